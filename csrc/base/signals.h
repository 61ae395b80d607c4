#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace lowcomm {

// Signals during a wait. Python runs a signal's handler in its main thread, between two of its instructions: a wait in
// C++ on that thread would put it off until the wait is over. So such a wait runs handlers ten times a second.

// Thrown by a wait: what a handler raised, and its name for messages. No std::exception, so that no caller on its way
// takes it for an error of what is waited for.
struct SignalError {
  std::exception_ptr error;
  std::string name;
};

// Runs the handlers of signals that have come, on the calling thread, which may hold no lock. The bindings install it;
// C++ programs install none.
using SignalHandlers = std::optional<SignalError> (*)();
void installSignalHandlers(SignalHandlers run);

// Whether handlers run on the calling thread: the process's first one, where they are installed.
bool handlesSignals();

// Runs them if they do. Throws SignalError.
void runSignalHandlers();

// Calls ended(patience), which waits no longer than that, until it returns true or `timeout` is over (0: never), and
// runs handlers meanwhile. Returns whether it returned true. Where a handler raises, calls interrupt(name), which must
// make `ended` true soon, and throws SignalError once it is.
bool waitWithSignals(std::chrono::milliseconds timeout, const std::function<bool(std::chrono::milliseconds)>& ended,
                     const std::function<void(const std::string& name)>& interrupt);

}  // namespace lowcomm

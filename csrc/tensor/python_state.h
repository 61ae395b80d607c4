#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <functional>

namespace lowcomm {

// While it lives, thread-local state captured by the calling thread holds no Python object. Around every call of an
// inner backend, and where an op is issued: a worker may drop the last reference of a Work, and with it of the state
// captured for its callbacks, after the interpreter is gone, which aborts the process. (A wholly fresh state would also
// lose no_grad and the profiler.)
class NoPythonObjects {
 public:
  NoPythonObjects() : saved_(at::impl::ThreadLocalPythonObjects::get_state()) {
    at::impl::ThreadLocalPythonObjects::set_state({});
  }
  ~NoPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state(std::move(saved_)); }
  NoPythonObjects(const NoPythonObjects&) = delete;
  NoPythonObjects& operator=(const NoPythonObjects&) = delete;

 private:
  at::impl::ThreadLocalPythonObjects saved_;
};

// Runs something that waits for another thread, with the interpreter's lock released where the caller holds it: the
// worker may be running a Python callback. The bindings install how; without them (C++ tests) it just runs.
using BlockingGuard = void (*)(const std::function<void()>& wait);
inline BlockingGuard blocking_guard = nullptr;
inline void blocking(const std::function<void()>& wait) {
  blocking_guard ? blocking_guard(wait) : wait();
}

}  // namespace lowcomm

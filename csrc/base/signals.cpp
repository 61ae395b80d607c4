#include "base/signals.h"

#include <unistd.h>

#include <algorithm>

namespace lowcomm {
namespace {
SignalHandlers installed = nullptr;
}

void installSignalHandlers(SignalHandlers run) {
  installed = run;
}

bool handlesSignals() {
  return installed && gettid() == getpid();
}

void runSignalHandlers() {
  if (!handlesSignals()) return;
  if (const auto raised = installed()) throw *raised;
}

bool waitWithSignals(std::chrono::milliseconds timeout, const std::function<bool(std::chrono::milliseconds)>& ended,
                     const std::function<void(const std::string& name)>& interrupt) {
  using Clock = std::chrono::steady_clock;
  const std::chrono::milliseconds glance = handlesSignals() ? std::chrono::milliseconds(100) : std::chrono::hours(1);
  const auto end = Clock::now() + timeout;
  std::optional<SignalError> raised;
  for (;;) {
    auto patience = glance;
    if (timeout.count() > 0 && !raised) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
      patience = std::clamp(left, std::chrono::milliseconds(0), glance);
    }
    if (ended(patience)) break;
    if (raised) continue;
    if (timeout.count() > 0 && Clock::now() >= end) return false;
    if (handlesSignals() && (raised = installed())) interrupt(raised->name);
  }
  if (raised) throw *raised;
  return true;
}

}  // namespace lowcomm

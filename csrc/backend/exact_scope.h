#pragma once

#include <atomic>
#include <memory>

namespace lowcomm {

// lc.exact(): ops that a thread issues between enter() and leave() are not compressed. Scopes nest. leave() may be
// called on another thread (a generator that is closed elsewhere): it ends the scope of the thread that entered.
class ExactScope {
 public:
  void enter();
  void leave();

  // Whether the calling thread is inside a scope.
  static bool active();

 private:
  std::shared_ptr<std::atomic<bool>> open_;
};

}  // namespace lowcomm

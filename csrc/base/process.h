#pragma once

#include <sys/types.h>
#include <unistd.h>

namespace lowcomm {

// The process that made an object. A child that it forks has a copy of the object and none of its threads: to join one
// would take for ever.
class Process {
 public:
  bool isHere() const { return id_ == ::getpid(); }
  pid_t id() const { return id_; }

 private:
  pid_t id_ = ::getpid();
};

// Deletes what has threads where they are; a forked child's copy is left alone.
class UnlessForked {
 public:
  template <class T>
  void operator()(T* object) const {
    if (process_.isHere()) delete object;
  }

 private:
  Process process_;
};

}  // namespace lowcomm

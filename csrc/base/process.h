#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace lowcomm {

// Writes a line to stderr, at once and whole, for what no caller waits to hear: the core has no other log. Thread-safe.
inline void logLine(const std::string& text) {
  std::fputs(("lowcomm: " + text + "\n").c_str(), stderr);
}

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

#pragma once

#include <chrono>
#include <string>

namespace lowcomm {

// Where the ranks of a group that is being made leave values for each other, before any connection between them exists.
// A key is set by one rank, once. A transport is made by one function of a Rendezvous, the rank and the group's size,
// which returns once all ranks have called it.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // Returns once the key has a value. Throws an exception, whose text is one line, where it has none after `timeout`.
  virtual void wait(const std::string& key, std::chrono::milliseconds timeout) = 0;

  // The value of a key that has one. Throws as wait() where it cannot be read.
  virtual std::string get(const std::string& key) = 0;
};

}  // namespace lowcomm

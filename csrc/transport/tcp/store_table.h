#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>

#include "transport/tcp/store_message.h"

namespace lowcomm::tcp {

// The keys of a store with their values, and its queues, as torch's stores have them. Not thread-safe.
class StoreTable {
 public:
  // Does what a request asks for and returns the answer; nothing where the request has to wait for a key, or for a
  // value of a queue. An answer of the kind `refused` has changed nothing.
  std::optional<StoreMessage> answer(const StoreMessage& request);

 private:
  std::optional<StoreMessage> values(const StoreMessage& request) const;

  std::map<std::string, std::string> values_;
  std::map<std::string, std::deque<std::string>> queues_;
};

}  // namespace lowcomm::tcp

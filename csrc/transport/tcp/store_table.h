#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

// Requests to a store, and the table that answers them.

namespace lowcomm::tcp {

// Requests and answers of a client of a store and its server (FORMAT.md: A store on the port), little-endian. Each goes
// as two messages of a channel: kStoreHeaderBytes with the number of bytes that follow, on tag 0, and these, on tag 1.
struct StoreMessage {
  // Of a request; texts and number are its arguments.
  enum class Kind : uint32_t {
    set = 0,          // key, value
    get = 1,          // key; waits for it
    add = 2,          // key; number
    compare_set = 3,  // key, expected, new value
    erase = 4,        // key
    check = 5,        // keys
    count = 6,        //
    wait = 7,         // keys; waits for all
    append = 8,       // key, value
    multi_get = 9,    // keys; waits for all
    multi_set = 10,   // key, value, key, value, ...
    push = 11,        // key, value; of a queue
    pop = 12,         // key; waits for a value where wait_ms is not 0
    length = 13,      // key
    list = 14,        //
    ok = 100,         // an answer: texts or number
    timed_out = 101,  // an answer: a key did not come, or the queue is empty
    refused = 102,    // an answer: texts[0] says why
  };
  Kind kind = Kind::ok;
  int64_t number = 0;
  uint64_t wait_ms = 0;  // of a request that waits
  std::vector<std::string> texts = {};

  std::vector<std::byte> bytes() const;

  // Throws WireError.
  static StoreMessage parse(std::span<const std::byte> bytes);
};

inline constexpr uint32_t kStoreHeaderTag = 0, kStoreBodyTag = 1;
inline constexpr size_t kStoreHeaderBytes = 8;
inline constexpr uint64_t kMostStoreBytes = uint64_t{32} << 20;

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

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/tcp/out_stream.h"
#include "transport/tcp/wire.h"
#include "transport/transport.h"

namespace lowcomm::tcp {

// A message in transfer, shared by its channel and the caller's Transfer. Thread-safe.
class Delivery {
 public:
  // `then`, where there is one, is called once, when it has ended either way, under the channel's lock.
  explicit Delivery(std::function<void()> then = {}) : then_(std::move(then)) {}

  // `bytes`: how long the message was.
  void complete(size_t bytes);
  void fail(TransportError::Kind kind, const std::string& why);

  // Whether one of them was called: wait() does not block then.
  bool ended();

  // Blocks until one of them was called; returns the message's bytes. Throws TransportError: what failed, or timed_out
  // after `deadline`.
  size_t wait(int peer, std::chrono::milliseconds deadline);

  // Set by Receives::receive: the message came or was offered before its receive, and a record about it is to be
  // written.
  bool came_early = false;

 private:
  void end();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> then_;
  bool done_ = false, failed_ = false;
  size_t bytes_ = 0;
  TransportError::Kind kind_{};
  std::string why_;
};

// A message that has no receive yet costs its receiver so many bytes.
inline uint64_t earlyCost(uint64_t bytes) {
  return bytes + kMessageCost;
}

// The messages that this rank sends over a channel: from send() until the peer reports each delivered. A
// message's bytes stay where the caller has them. Messages of more than `most_early` bytes in all, earlyCost() each,
// are offered, and their bytes follow when the peer wants them.
//
// Not thread-safe: the channel's lock guards it. Records go to `out`, which outlives this.
class Sends {
 public:
  Sends(OutStream& out, uint64_t most_early) : out_(out), most_early_(most_early) {}

  // MessageStream::send.
  std::shared_ptr<Delivery> send(uint32_t tag, std::span<const std::byte> data, uint64_t place,
                                 std::function<void()> then);

  // The peer's records about message `number`. WireError for one that does not fit the message's state.
  void wanted(uint64_t number);
  void delivered(uint64_t number);

  void fail(TransportError::Kind kind, const std::string& why);

 private:
  // A message which the peer has not reported delivered.
  struct Undelivered {
    std::shared_ptr<Delivery> delivery;
    std::span<const std::byte> data;
    uint64_t place = 0, end = 0;  // end: of its bytes in the stream, or before that
    bool is_offered = false;      // and not wanted yet
    bool is_unasked = false;
  };

  Undelivered& undelivered(uint64_t number, const char* record);

  OutStream& out_;
  const uint64_t most_early_;
  uint64_t sent_ = 0;     // messages
  uint64_t unasked_ = 0;  // costs of undelivered messages that were not offered
  uint64_t offered_ = 0;  // messages that the peer has not wanted yet
  std::unordered_map<uint64_t, Undelivered> undelivered_;
};

// The messages that this rank receives over a channel: from the peer's first record of each until it is reported
// delivered. A message without a receive waits in memory of this object's, at most `most_early` bytes in
// all, earlyCost() each.
//
// Not thread-safe: the channel's lock guards it. Records go to `out`, which outlives this.
class Receives {
 public:
  Receives(OutStream& out, uint64_t most_early) : out_(out), most_early_(most_early) {}

  // MessageStream::receive and unclaimed.
  std::shared_ptr<Delivery> receive(uint32_t tag, std::span<std::byte> room, std::function<void()> then);
  std::optional<uint32_t> unclaimed(uint32_t first) const;

  // The peer's records that announce messages (message, offered, body). WireError for an invalid or untimely
  // one, a message longer than its receive, or more messages without receives than allowed.
  void begin(const Record& record);
  void beginBody(const Record& record);

  // While the bytes of a message come: where the next ones belong, and that the first `bytes` of that are filled.
  bool isComing() const { return coming_now_ != nullptr; }
  std::span<std::byte> room();
  void arrived(size_t bytes);

  // The end of the last delivered record in the stream out.
  uint64_t reportedUpTo() const { return reported_up_to_; }

  void fail(TransportError::Kind kind, const std::string& why);

 private:
  struct Receive {
    std::span<std::byte> room;
    std::shared_ptr<Delivery> delivery;
  };
  // A message that has begun to come, or is offered: to its receive, or, before that is posted, to memory of its own.
  struct Incoming {
    Record record;
    uint64_t have = 0;
    std::span<std::byte> to;
    std::vector<std::byte> own;
    std::shared_ptr<Delivery> delivery;  // null: its receive is not posted
    std::span<std::byte> room = {};      // of the receive
    bool is_wanted = false;              // and its body has not begun to come
    uint64_t counted = 0;                // of early_offers_ where it is offered, else of early_bytes_
    bool offered() const { return record.kind == Record::Kind::offered; }
  };

  void count(Incoming& message);
  void uncount(Incoming& message);
  void match(const std::shared_ptr<Incoming>& message);
  std::optional<Receive> takePosted(uint32_t tag);
  void want(Incoming& message);
  void finish(Incoming& message);

  OutStream& out_;
  const uint64_t most_early_;
  uint64_t reported_up_to_ = 0;
  uint64_t come_ = 0;  // messages
  std::shared_ptr<Incoming> coming_now_;
  std::map<uint32_t, std::deque<Receive>> posted_;
  std::map<uint32_t, std::deque<std::shared_ptr<Incoming>>> early_;  // came before their receives, by tag
  uint64_t early_bytes_ = 0, early_offers_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Incoming>> coming_;  // all that were not delivered
};

}  // namespace lowcomm::tcp

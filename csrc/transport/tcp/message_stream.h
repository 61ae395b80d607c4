#pragma once

#include <array>
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

// A message under way, shared by its channel and the caller's Transfer. Thread-safe.
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

  // Set by MessageStream::receive: the message came or was offered before its receive, and a word of it is to be
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

// The messages between this rank and a peer, as a stream of bytes each way that survives the connections which carry
// it. It knows no sockets: a connection asks for the bytes from an offset on, and brings those that have come.
//
// A message stays where its sender has it until its receiver has copied it to where it is wanted, and says so in the
// stream the other way (Record::delivered). So a send is done when its receive is, as with gloo, and nothing is kept
// for sending again.
//
// A message whose receive is not posted yet waits in memory of the receiver's. What may come so is bounded: a sender
// that has `most_early` bytes under way, kMessageCost added for each message, offers what is more, and its bytes follow
// when they are wanted (Record::offered). Nor does it offer more messages than would cost as much.
//
// Either end may close a tag, which gives up all that it sends and receives with it.
//
// Thread-safe, one lock. The connection's functions are called under it (lock()); no span of a caller's is touched
// without it.
class MessageStream {
 public:
  explicit MessageStream(int peer, uint64_t most_early = kUnaskedBytes) : peer_(peer), most_early_(most_early) {}

  // Both throw the TransportError that the channel has failed with; ValueError for more than kMostMessageBytes, or more
  // offers than may be under way. `then`: as Delivery's.
  // `place`: of the message among those of all channels, in which they leave this process (Endpoint); above 0.
  std::shared_ptr<Delivery> send(uint32_t tag, std::span<const std::byte> data, uint64_t place = 1,
                                 std::function<void()> then = {});
  std::shared_ptr<Delivery> receive(uint32_t tag, std::span<std::byte> room, std::function<void()> then = {});

  // As Transport::closeTag.
  void closeTag(uint32_t tag);

  // The lowest tag from `first` on of a message that has begun to come and has no receive.
  std::optional<uint32_t> unclaimed(uint32_t first);

  // As Transport::acknowledge: waits no longer than `patience`.
  void acknowledge(std::chrono::milliseconds patience);

  // Every message under way fails, and later ones do. Of several calls the first counts.
  void fail(TransportError::Kind kind, const std::string& why);
  bool failed();

  // ---- for the connection, under the lock ----
  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }

  OutStream& out() { return out_; }

  // Bytes of the stream in, and where its next ones belong, not empty.
  uint64_t in() const { return in_; }
  std::span<std::byte> room();

  // The first `bytes` of room() have been filled. WireError for an invalid or untimely record, a message longer than
  // its receive, or more messages without receives than allowed.
  void arrived(size_t bytes);

  // The message under way, if there is one, ends here. WireError in the middle of a record.
  void cut();

  // The connection has written the stream out as far as `end`.
  void wrote(uint64_t end);

 private:
  static constexpr const char* kByPeer = "the message was cancelled by the peer";

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
    bool given_up = false;               // what comes of it is dropped
    uint64_t counted = 0;                // of early_offers_ where it is offered, else of early_bytes_
    bool offered() const { return record.kind == Record::Kind::offered; }
  };
  // A message out of which the peer has not said that it was delivered or dropped.
  struct Undelivered {
    std::shared_ptr<Delivery> delivery;
    std::span<const std::byte> data;
    uint64_t place = 0, end = 0;  // end: of its bytes in the stream, or before that
    uint32_t tag = 0;
    bool is_offered = false;  // and not wanted yet
    bool is_unasked = false;
    bool given_up = false;
  };

  static uint64_t costOf(uint64_t bytes) { return bytes + kMessageCost; }
  uint64_t mostOffered() const { return most_early_ / kMessageCost; }
  void count(Incoming& message);
  void uncount(Incoming& message);
  void begin(const Record& record);
  void beginMessage(const Record& record);
  void beginBody(const Record& record);
  void delivered(uint64_t number, bool dropped);
  void wanted(uint64_t number);
  void want(const std::shared_ptr<Incoming>& message);
  void finish(Incoming& message);
  std::vector<uint64_t> numbersOf(uint32_t tag) const;
  void giveUp(const std::vector<uint64_t>& numbers);
  void giveUp(Incoming& message, const char* why);
  void givenUp(uint64_t number);
  void drop(uint64_t number);
  void closedByPeer(uint32_t tag);
  bool isClosedHere(uint32_t tag) const;
  void match(const std::shared_ptr<Incoming>& message);
  std::optional<Receive> takePosted(uint32_t tag);
  Undelivered& undelivered(uint64_t number, const char* word);
  void expectFits(const Record& record, size_t room) const;
  void expectLiving() const;

  const int peer_;
  const uint64_t most_early_;
  std::mutex mutex_;
  bool failed_ = false;
  TransportError::Kind kind_{};
  std::string why_;

  OutStream out_;
  uint64_t told_ = 0;     // the end of the last delivered or dropped record in out_
  uint64_t written_ = 0;  // how much of out_ the connection has written
  std::condition_variable written_more_;
  uint64_t sent_ = 0;     // messages
  uint64_t unasked_ = 0;  // costs of undelivered messages that were not offered
  uint64_t offered_ = 0;  // messages that the peer has not wanted yet
  std::unordered_map<uint64_t, Undelivered> undelivered_;

  uint64_t in_ = 0;
  uint64_t come_ = 0;  // messages
  std::array<std::byte, kRecordHeaderBytes> header_;
  size_t header_have_ = 0;
  std::shared_ptr<Incoming> incoming_;  // null between messages
  std::map<uint32_t, std::deque<Receive>> posted_;
  std::map<uint32_t, std::deque<std::shared_ptr<Incoming>>> early_;  // came before their receives, by tag
  uint64_t early_bytes_ = 0, early_offers_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Incoming>> coming_;  // all that were neither delivered nor dropped
  std::map<uint32_t, bool> closed_;  // tags that one end has closed: whether it is this one
  std::vector<std::byte> dropped_;   // where bytes come that nobody wants
};

}  // namespace lowcomm::tcp

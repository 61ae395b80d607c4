#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "transport/tcp/messages.h"
#include "transport/tcp/out_stream.h"
#include "transport/tcp/wire.h"
#include "transport/transport.h"

namespace lowcomm::tcp {

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
// Thread-safe, one lock. The connection's functions are called under it (lock()); no span of a caller's is touched
// without it.
class MessageStream {
 public:
  explicit MessageStream(int peer, uint64_t most_early = kUnaskedBytes)
      : peer_(peer), sends_(out_, most_early), receives_(out_, most_early) {}

  // Both throw the TransportError that the channel has failed with; ValueError for more than kMostMessageBytes, or more
  // offers than may be under way. `then`: as Delivery's.
  // `place`: of the message among those of all channels, in which they leave this process (Endpoint); above 0.
  std::shared_ptr<Delivery> send(uint32_t tag, std::span<const std::byte> data, uint64_t place = 1,
                                 std::function<void()> then = {});
  std::shared_ptr<Delivery> receive(uint32_t tag, std::span<std::byte> room, std::function<void()> then = {});

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

  // The connection has written the stream out as far as `end`.
  void wrote(uint64_t end);

 private:
  void handle(const Record& record);
  void expectLiving() const;

  const int peer_;
  std::mutex mutex_;
  bool failed_ = false;
  TransportError::Kind kind_{};
  std::string why_;

  OutStream out_;
  uint64_t written_ = 0;  // how much of out_ the connection has written
  std::condition_variable written_more_;
  uint64_t in_ = 0;
  std::array<std::byte, kRecordHeaderBytes> header_;
  size_t header_have_ = 0;
  Sends sends_;
  Receives receives_;
};

}  // namespace lowcomm::tcp

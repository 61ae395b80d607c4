#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "collective/message_summary.h"
#include "collective/op_context.h"
#include "collective/plan.h"
#include "collective/source_sink.h"
#include "messages/announcement.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {

// The version of a sample that neither side keeps: its channel's memory is full.
inline constexpr uint32_t kNotKept = UINT32_MAX;

// A sample of a channel's message, and how often its state was updated.
struct SampleKey {
  uint64_t sample = 0;
  uint32_t version = 0;
};

// The identity of a message, equal on both sides: its flow and, in a channel, its samples in order.
struct MessageKey {
  MessageFlow flow;
  std::vector<SampleKey> samples = {};
  std::string memory = {};  // the type that both sides remember samples in; empty without a memory
  // For a channel's reader of errors, records and counters, who does not know its number; ranks do not compare them.
  std::string edge = {};  // "forward boundary 0"; counters are kept by it
  std::string part = {};  // "micro-batch 3"
  // "comes back" or "none"; empty where the channel's user does not say whether a gradient answers. Ranks compare it.
  std::string gradient = {};
};

// The frames of `elements` elements: planMessage, with one empty frame if there are no elements, so that a peer that
// expects some gets an error. TypeError when the codec does not take the dtype.
MessagePlan planP2p(uint64_t elements, const CodecSpec& codec, DType dtype, size_t chunk_bytes);

// planP2p() for segments, each with a codec of its own.
MessagePlan planP2p(const Layout& layout, DType dtype, size_t chunk_bytes);

// A wait for what another thread does, as a transfer: OpContext::wait counts it and describes its failure.
template <class Known>
class ConditionWait final : public Transfer {
 public:
  // `what` ends the text of a time-out: "a sender". `known` is called with the lock: whether it has been done; it may
  // throw instead.
  ConditionWait(std::mutex& mutex, std::condition_variable& changed, int peer, const char* what, Known known)
      : mutex_(mutex), changed_(changed), peer_(peer), what_(what), known_(std::move(known)) {}

  void wait(std::chrono::milliseconds deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_for(lock, deadline, known_)) return;
    throw TransportError(TransportError::Kind::timed_out, peer_,
                         "timed out waiting " + std::to_string(deadline.count()) + " ms for " + what_);
  }

 private:
  std::mutex& mutex_;
  std::condition_variable& changed_;
  const int peer_;
  const char* const what_;
  const Known known_;
};

// One message between two ranks, under way from P2p::send or P2p::recv until P2p::finish.
class P2pMessage : public std::enable_shared_from_this<P2pMessage> {
 public:
  virtual ~P2pMessage() = default;
  P2pMessage(const P2pMessage&) = delete;
  P2pMessage& operator=(const P2pMessage&) = delete;

  // Counters are kept by it: "send", "recv"; of a channel with its edge or number, "send forward boundary 0".
  std::string countedAs() const;

  // "send with tag 7", "recv of channel 771, forward boundary 0, micro-batch 3"; its sequence is the message's number,
  // given when it is posted: of a receive the one that it has if its sender counts the tag by itself, and when it has
  // come that of its frames.
  OpContext op;
  const int peer;
  const MessageKey key;
  const MessagePlan plan;
  const bool sends;

 protected:
  // `type_name`, `type_elements`: the caller's name of the elements' type, and their number, as MessageSummary::as.
  P2pMessage(GroupContext& group, bool sends, int peer, MessageKey key, MessagePlan plan, const std::string& type_name,
             const std::string& type_elements);

  friend class P2p;
  // Waits, as a part of `resuming`, until nothing of it is under way; what came is not looked at.
  virtual void drop(OpContext& resuming) = 0;
  // Whether all of it has been sent or received. Only for a message that no thread finishes.
  virtual bool isThrough() = 0;
  uint32_t transportTag(size_t k) const { return MessageTags::ofFrame(k, op.group.connections, *first_tag_); }
  FrameHeader header(const Frame& frame) const;
  // The flight record's: what both sides must mean, and how many frames will come.
  void note(uint32_t expected_frames) const;

  const KeyValues description_;  // what the two sides compare
  const uint64_t description_hash_;
  const uint32_t versions_crc_;
  // All under the group's lock. Whether its holder finishes it, who then notes its end; whether the number of a
  // receive has been counted among those of its sender's common count.
  bool finishing_ = false;
  bool taken_down_ = false;
  bool dropped_ = false;               // its block has begun anew: it is as good as refused
  std::optional<uint32_t> first_tag_;  // of its own; of a send known once it is announced
};

// A message to send. Its frames leave once its receiver has announced that it expects this message: frames encoded
// before wait in memory, frames encoded later leave one by one.
class P2pSend : public P2pMessage {
 public:
  // Whether its elements could not be encoded: finish() will throw. Known once it has been sent.
  bool spoilt() const { return own_error_ != nullptr; }

  P2pSend(GroupContext& group, int peer, MessageKey key, MessagePlan plan, const std::string& type_name = "",
          const std::string& type_elements = "");

 private:
  friend class P2p;
  struct Outgoing {
    BufferPool::Buffer buffer;
    size_t bytes;
  };

  // Encodes every frame. On the thread that posts the message.
  void encode(Source& source);
  // The receiver has announced itself; any thread, once. Frames leave, or, where it expects another message, as many
  // error frames as it has receives.
  void announced(const Announcement& theirs);
  // One side has withdrawn before it was announced: it stays behind.
  void withdraw(const std::string& why);
  // This message answers a receive that has no other: error frames go in its place.
  void refuse(const Announcement& theirs, const std::string& why);
  void drop(OpContext& resuming) override;
  bool isThrough() override;
  // No announcement will come: the lane is lost.
  void lose(const TransportError& error);
  // Waits until the receiver has announced itself, which hands the frames to the transport. Throws TransferError.
  void waitForReceiver();
  // Waits until every frame has arrived, or the group takes those that have not (LeavingFrames). Throws TransferError.
  void waitForArrival();
  // Why the message was not delivered: the ValueError of its elements, or PeerRefusal where the receiver expects
  // another one. Null where it was.
  std::exception_ptr error();

  size_t encodeFrame(Source& source, size_t k, std::byte* frame);
  std::vector<OutgoingFrame> release();
  void sendReady();
  void sendErrors(uint32_t frames, const std::string& reason);
  void start(size_t k, std::span<const std::byte> frame);

  size_t started_ = 0;            // frames that a device has begun to encode
  std::exception_ptr own_error_;  // the ValueError of its elements
  std::string reason_;            // what error frames say of it

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  bool announced_ = false;
  std::exception_ptr refused_;  // the receiver expects another message, or a side has withdrawn
  std::optional<TransportError> lost_;
  size_t announcement_bytes_ = 0;
  std::vector<Outgoing> frames_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
};

// A message to receive, into memory of its frames' largest size: the sender compares descriptions before anything
// longer comes.
class P2pRecv : public P2pMessage {
 public:
  P2pRecv(GroupContext& group, int peer, MessageKey key, MessagePlan plan, const std::string& type_name = "",
          const std::string& type_elements = "");

 private:
  friend class P2p;

  // Posts the receives, then announces them.
  void post(AnnouncementBoard& board);
  // Waits for frame k and checks it; `adopt` sees the first frame's header before the number is compared. The payload,
  // or nothing where it is an error frame.
  template <class Adopt>
  std::optional<std::span<const std::byte>> take(size_t k, Adopt&& adopt);
  void drop(OpContext& resuming) override;
  bool isThrough() override;
  // Releases its frames: it is through.
  void release();
  // The header of the first frame of a message that is through; nothing where it does not open.
  std::optional<FrameHeader> firstHeader() const;
  // PeerRefusal where error frames came. Null where the message did.
  std::exception_ptr error() const;

  std::unique_ptr<Sink> sink_;
  std::vector<BufferPool::Buffer> frames_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
  AnnouncementBoard::Delivery announcement_;
  std::optional<std::string> refused_;  // what the sender's error frame said
};

template <class Adopt>
std::optional<std::span<const std::byte>> P2pRecv::take(size_t k, Adopt&& adopt) {
  op.wait(*transfers_[k], peer, "waiting for a frame", static_cast<uint32_t>(k));
  op.note([&](OpProgress::State& state) { state.frames[peer].received = static_cast<uint32_t>(k + 1); });
  std::optional<std::span<const std::byte>> taken;
  op.attribute(peer, [&] {
    const std::span<const std::byte> bytes = BufferPool::span(frames_[k]);
    const FrameHeader got = openFrame(bytes);
    op.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
    const std::span<const std::byte> payload = framePayload(bytes, got);
    if (k == 0 && got.epoch == op.group.epoch) adopt(got);
    if (got.kind == FrameKind::error && got.sequence == op.sequence && got.epoch == op.group.epoch) {
      const std::string why(reinterpret_cast<const char*>(payload.data()), std::min(payload.size(), kMaxErrorText));
      if (!refused_) refused_ = why;
      return;
    }
    expectFrame(got, header(plan.frames[k]));
    taken = payload;
  });
  return taken;
}

}  // namespace lowcomm

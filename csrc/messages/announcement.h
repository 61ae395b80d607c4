#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "collective/context.h"
#include "transport/transport.h"
#include "wire/key_values.h"

namespace lowcomm {

// A message's tag is 0...kP2pTags - 1, a channel's number 0...kChannels - 1. Transport tags below kFirstMessageTag
// belong to the collectives; every message has kOpTags of its own from there on, below kEndOfMessageTags (MessageTags).
inline constexpr uint32_t kFirstMessageTag = kTaggedOps * kOpTags;
inline constexpr uint32_t kEndOfMessageTags = 1u << 29;
inline constexpr uint32_t kP2pTags = 1u << 30;
inline constexpr uint32_t kChannels = 1u << 21;
// The channels of a block, those of one boundary of a pipeline, are withdrawn together (P2p::withdraw).
inline constexpr uint32_t kBlockChannels = 1u << 12;
inline constexpr uint32_t kBlocks = kChannels / kBlockChannels;

// A text that a peer says over the control lane in a frame of its own; `text` lies in the frame.
struct ControlText {
  uint32_t sequence = 0;
  std::string_view text;
};

// Throws WireError that names the first header field which does not belong to a control frame of that epoch.
ControlText openControlText(std::span<const std::byte> frame, uint32_t epoch);

// One flow of messages from one rank to another: those of a tag (c10d's send and recv), or of a channel, whose
// messages carry the keys of their samples. Messages of a flow keep their order; flows do not wait for each other.
struct MessageFlow {
  enum class Kind : uint8_t { tag, channel };
  Kind kind = Kind::tag;
  uint32_t number = 0;

  bool channel() const { return kind == Kind::channel; }
  uint32_t block() const { return number / kBlockChannels; }  // of a channel
  std::string name() const;                                   // "tag 7", "channel 2"

  auto operator<=>(const MessageFlow&) const = default;
};

// The numbers of messages from one rank to another (FORMAT.md, "Point to point"). What is kept of them is bounded,
// however many tags a program uses: the first kCountedTags that a sender uses are counted each by itself, and the
// messages of all others by one count, told apart by kSharedNumber. Each channel is counted by itself. Not thread-safe.
inline constexpr size_t kCountedTags = 1024;
inline constexpr uint32_t kSharedNumber = 1u << 31;  // set in a number of the common count

// Numbers the messages that a sender sends.
class SenderNumbers {
 public:
  // The number of the flow's next message.
  uint32_t next(const MessageFlow& flow);

  // The last `count` numbers of a channel, whose messages have not left, are given again.
  void giveBack(const MessageFlow& channel, uint32_t count) {
    counted_[channel] = (counted_[channel] - count) & ~kSharedNumber;
  }

 private:
  std::map<MessageFlow, uint32_t> counted_;  // the last number
  size_t tags_ = 0;                          // among them
  uint32_t shared_ = 0;
};

// Numbers the messages of a receiver, which cannot know how its sender counts a tag until the first message of the tag
// has arrived.
class ReceiverNumbers {
 public:
  // The last number of a flow that its sender counts by itself; 0 of any other.
  uint32_t last(const MessageFlow& flow) const;
  void remember(const MessageFlow& flow, uint32_t last) { counted_[flow] = last; }

  // Takes down a number of the common count. False where it has come before.
  bool take(uint32_t number);

 private:
  std::map<MessageFlow, uint32_t> counted_;
  uint32_t whole_ = 0;          // all shared numbers up to here have come
  std::set<uint32_t> further_;  // those that came out of order: tags may be received in any
};

// The transport tags of the messages from one rank to another, which their receiver picks: kOpTags of them for each
// message, used anew after 2^21 messages, those of the two directions apart. Not thread-safe.
class MessageTags {
 public:
  // Tags of messages from `peer` to `rank`.
  MessageTags(int rank, int peer) : is_odd_(rank > peer) {}

  // The first tag of the next message.
  uint32_t next() {
    const auto number = static_cast<uint32_t>(count_++ % kMessages);
    return kFirstMessageTag + (2 * number + (is_odd_ ? 1 : 0)) * kOpTags;
  }

  // Whether tags come again, of which some may still be in use.
  bool comeAgain() const { return count_ > kMessages; }

  // The transport tag of frame k of a message: one of those from `first_tag` on, so that frames take a group's
  // connections in turn, and so do messages of one frame.
  static uint32_t ofFrame(size_t k, int connections, uint32_t first_tag);

  // Whether it may be that of a message to `rank`.
  static bool belongs(uint32_t first_tag, int rank, int peer);

 private:
  static constexpr uint32_t kMessages = (kEndOfMessageTags - kFirstMessageTag) / (2 * kOpTags);
  const bool is_odd_;
  uint64_t count_ = 0;
};

// The number after `number` in its count.
constexpr uint32_t numberAfter(uint32_t number) {
  return (number & kSharedNumber) | ((number + 1) & ~kSharedNumber);
}

// A receiver tells this to the sender of a message, once it has posted its receives (FORMAT.md, "Point to point").
struct Announcement {
  MessageFlow flow;
  uint32_t frames = 0;         // receives posted
  uint32_t first_tag = 0;      // the message's
  KeyValues description = {};  // of the message that it expects
  size_t bytes = 0;            // of the frame that brought it

  std::string text() const;
  // Throws WireError.
  static Announcement parse(std::string_view text);
};

// A rank tells this to another when it takes no more part in what both had under way on a block of channels (FORMAT.md,
// "Withdrawals").
struct Withdrawal {
  uint32_t block = 0;
  uint32_t period = 0;  // how often the block's messages have begun anew
  std::string why;      // the first cause, kMaxErrorText bytes at most

  std::string text() const;
  // Throws WireError.
  static Withdrawal parse(std::string_view text);
};

// A rank that receives a message of a tag from any rank asks each of them for one, and those that
// have one answer (FORMAT.md, "Receives from any rank").
struct AnySourceMessage {
  MessageFlow flow;               // a tag's
  std::optional<uint32_t> offer;  // nothing: a question; else how many receives of the flow were announced since it

  std::string text() const;
  // Throws WireError.
  static AnySourceMessage parse(std::string_view text);
};

// A group's announcements: those that this rank sends, and those that come from each peer that it listens to. They
// include withdrawals and messages about receives from any rank, in order. They travel over the control lane, where
// they never queue behind frames. Thread-safe.
class AnnouncementBoard {
 public:
  // Called on a thread of the board's own, of one peer in the order in which it announced; `lost` once, when there will
  // be no more.
  struct Handlers {
    std::function<void(int peer, Announcement announcement)> announcement;
    std::function<void(int peer, const Withdrawal& withdrawal)> withdrawal;
    std::function<void(int peer, const AnySourceMessage& message)> any_source;
    std::function<void(int peer, const TransportError& why)> lost;
  };
  AnnouncementBoard(GroupContext& group, Handlers handlers);
  ~AnnouncementBoard();  // as stop()

  // Bytes of an announcement's payload at most.
  static constexpr size_t kMaxText = 4096;
  // Announcements that may travel at a time from one peer: without receives posted ahead each would cost a round trip.
  static constexpr size_t kAhead = 32;

  // An announcement under way; it has arrived when frames of its message have.
  struct Delivery {
    BufferPool::Buffer buffer;
    std::unique_ptr<Transfer> transfer;
    size_t bytes = 0;
  };

  // Tells `peer`. Throws TransportError.
  Delivery tell(int peer, const Announcement& announcement, uint32_t sequence) {
    return tell(peer, announcement.text(), sequence);
  }
  Delivery tell(int peer, const AnySourceMessage& message) { return tell(peer, message.text(), 0); }
  Delivery tell(int peer, const Withdrawal& withdrawal) { return tell(peer, withdrawal.text(), withdrawal.period); }

  // Receives what `peer` announces from now on; may be called again.
  void listen(int peer);

  // Ends the threads. The control lane must have been cancelled, or they go on.
  void stop();

 private:
  struct PostedReceive {
    BufferPool::Buffer buffer;
    std::unique_ptr<Transfer> receiving;
  };
  using PostedReceives = std::array<PostedReceive, kAhead>;
  Delivery tell(int peer, const std::string& text, uint32_t sequence);
  void receiveFrom(int peer);

  GroupContext& group_;
  const Handlers handlers_;
  BufferPool buffers_;
  std::mutex mutex_;
  std::map<int, std::thread> threads_;
  std::list<PostedReceives> receives_;  // one a thread; kept to the end: the lane may write to them that long
};

}  // namespace lowcomm

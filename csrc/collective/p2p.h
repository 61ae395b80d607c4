#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "codec/codec.h"
#include "collective/context.h"
#include "collective/device_codec.h"
#include "collective/message_numbers.h"
#include "collective/plan.h"
#include "collective/sink.h"
#include "collective/source.h"

namespace lowcomm {

// Messages between two ranks (FORMAT.md, "Point to point"): the frames of one tensor on the bulk lane, under a
// transport tag that the message's own tag gives. Messages of one (peer, tag) keep their order and meet no others, so
// ranks may receive in another order than they send in, and both may send before they receive. A frame carries the
// message's number, by which one that is missing, stale or came twice is named (message_numbers.h says for which tags).
// Of a message that is through nothing else is kept.
//
// Nothing waits for its turn here: a send hands each frame to the transport as it is encoded, a receive posts all its
// buffers, on the calling thread and at once. What that costs in memory, on both sides, is a frame's room (chunk_bytes
// of payload) for every frame of the message: its encoded size, and more for what ends in a short frame.
//
// A message that cannot be encoded to its end (a NaN under nonfinite=error, a range beyond delta) is one that arrives
// as such: error frames take the place of what is left, its receiver gets the reason, its sender the ValueError when it
// finishes, and both go on, as in a collective. Looking at all elements before anything is sent would keep the link
// idle for as long as encoding them does: both are bound by reading them.

// A message's tag is 0...kP2pTags - 1, its transport tag kFirstP2pTag more: those below belong to the collectives, and
// gloo has none above.
inline constexpr uint32_t kP2pTags = 1u << 30;
inline constexpr uint32_t kFirstP2pTag = 1u << 30;

// The frames of `elements` elements: planMessage, with one empty frame where there are none, so that a peer who expects
// some is told. TypeError when the codec does not take the dtype.
MessagePlan planP2p(uint64_t elements, const CodecSpec& codec, DType dtype, size_t chunk_bytes);

// One message under way. The group keeps it too, until a message of its (peer, tag, direction) is through that is not
// older: a holder who drops it leaves it to the transport.
class P2pMessage {
 public:
  // To send: post() reads `input`, plan.layout.elements() elements of plan.dtype; nobody does afterwards.
  P2pMessage(GroupContext& group, MessagePlan plan, const void* input, const Draws& draws, int peer, uint32_t tag,
             DeviceCodec* device_codec = nullptr);
  // To receive: finish() writes `output`, plan.layout.elements() elements of plan.dtype.
  P2pMessage(GroupContext& group, MessagePlan plan, void* output, int peer, uint32_t tag,
             DeviceCodec* device_codec = nullptr);
  // Both: where the elements are, for as long as post() or finish() is at them; null is host memory.

  // "send with tag 7" or "recv ..."; its sequence is the message's number, given when it is posted: of a receive the
  // one that it has if its sender counts the tag by itself, and when it has come that of its frames.
  OpContext op;
  const int peer;
  const uint32_t tag;

 private:
  friend class P2p;
  FrameHeader header(const Frame& frame) const;
  void describe(OpProgress::State& state) const;

  const MessagePlan plan_;
  const bool sends_;
  std::unique_ptr<Source> source_;  // until it is posted; of a send
  std::unique_ptr<Sink> sink_;      // until it is finished; of a receive
  std::vector<BufferPool::Buffer> frames_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
  bool finishing_ = false;              // by its holder, who notes its end; under the group's lock
  bool taken_down_ = false;             // of a receive: its number, where it is of the common count; likewise
  std::exception_ptr own_error_;        // of a send: its ValueError
  std::optional<std::string> refused_;  // of a receive: what the sender's error frame said
};

// The messages of one group. Thread-safe; one message is posted once, and finished by one thread.
class P2p {
 public:
  explicit P2p(GroupContext& group) : group_(group) {}

  // Gives the message its number, encodes it, and hands every frame to the transport. Throws TransferError.
  void post(const std::shared_ptr<P2pMessage>& message);

  // Waits for every frame, under the progress deadline, and decodes those of a receive one by one as they come. The
  // deadline runs from the wait: on a link that is busy with messages nobody waits for, theirs is no progress of this
  // one. Throws the ValueError of a send that could not be encoded, PeerRefused where the sender's could not, and any
  // other PeerError where a transfer failed or a frame is not the one expected (with both values).
  void finish(P2pMessage& message);

 private:
  // (peer, tag, whether it sends)
  using Key = std::tuple<int, uint32_t, bool>;
  // The messages under way of a key, and how many are about to be: a stream goes when there is neither.
  struct Stream {
    std::mutex in_order;  // posts one at a time: a stream's numbers are its order on the link
    size_t posting = 0;
    uint32_t last = 0;     // of a receiver: number given
    bool counted = false;  // of a receiver: whether its sender is known to count the tag by itself
    std::deque<std::shared_ptr<P2pMessage>> under_way;
  };
  // A stream while one is posted to it.
  class Posting;

  void send(P2pMessage& message);
  void receive(P2pMessage& message);
  void decode(P2pMessage& message);
  void adopt(P2pMessage& message, const FrameHeader& got);
  void takeDown(P2pMessage& message);
  void forget(const P2pMessage& done);
  void close(const Key& key, Stream& stream);
  static Key keyOf(const P2pMessage& message) { return {message.peer, message.tag, message.sends_}; }

  GroupContext& group_;
  std::mutex mutex_;  // of all below
  std::map<Key, Stream> streams_;
  std::map<int, SentNumbers> sent_;  // by peer
  std::map<int, ReceivedNumbers> received_;
};

}  // namespace lowcomm

#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "codec/codec.h"
#include "collective/context.h"
#include "collective/plan.h"

namespace lowcomm {

// Messages between two ranks (FORMAT.md, "Point to point"): the frames of one tensor on the bulk lane, under a
// transport tag that the message's own tag gives. Messages of one (peer, tag) keep their order and meet no others, so
// ranks may receive in another order than they send in, and both may send before they receive. A frame carries the
// message's number among those of its (peer, tag, direction), by which one that is missing, stale or came twice is
// named.
//
// Nothing waits for its turn here: a send hands all its frames to the transport, a receive posts all its buffers, on
// the calling thread and at once. What that costs in memory is the encoded message, on both sides.

// A message's tag is 0...kP2pTags - 1, its transport tag kFirstP2pTag more: those below belong to the collectives, and
// gloo has none above.
inline constexpr uint32_t kP2pTags = 1u << 30;
inline constexpr uint32_t kFirstP2pTag = 1u << 30;

// The frames of `elements` elements: planMessage, with one empty frame where there are none, so that a peer who expects
// some is told. TypeError when the codec does not take the dtype.
MessagePlan planP2p(uint64_t elements, const CodecSpec& codec, DType dtype, size_t chunk_bytes);

// A message whose payloads stand in frame buffers, of which nothing was sent yet.
struct EncodedMessage {
  MessagePlan plan;
  std::vector<BufferPool::Buffer> frames;
  OpContext::Clock::time_point start, end;  // of the encoding
  Loss loss;
};

// Encodes all of a message before any of it is sent: a ValueError (a NaN under nonfinite=error, a range beyond delta)
// leaves nothing half said and takes no number, so that the caller may send something else in its place. Checking the
// elements first and encoding them on the way would save no time (both are bound by reading them) and would have to
// know every codec's reasons.
EncodedMessage encodeP2p(GroupContext& group, MessagePlan plan, const void* input, const Draws& draws);

// One message under way. The group keeps it too, until a message of its (peer, tag, direction) is through that is not
// older: a holder who drops it leaves it to the transport.
class P2pMessage {
 public:
  // To send.
  P2pMessage(GroupContext& group, EncodedMessage encoded, int peer, uint32_t tag);
  // To receive: finish() writes `output`, plan.layout.elements() elements of plan.dtype.
  P2pMessage(GroupContext& group, MessagePlan plan, void* output, int peer, uint32_t tag);

  OpContext op;  // "send with tag 7" or "recv ..."; its sequence is the message's number, given when it is posted
  const int peer;
  const uint32_t tag;

 private:
  friend class P2p;
  FrameHeader header(const Chunk& chunk) const;
  void describe(OpProgress::State& state) const;

  const MessagePlan plan_;
  const bool sends_;
  void* const output_;
  std::vector<BufferPool::Buffer> frames_;
  std::vector<std::unique_ptr<Transfer>> transfers_;
};

// The messages of one group. Thread-safe; one message is posted once, and finished by one thread.
class P2p {
 public:
  explicit P2p(GroupContext& group) : group_(group) {}

  // Gives the message its number and hands every frame of it to the transport. Throws TransferError.
  void post(const std::shared_ptr<P2pMessage>& message);

  // Waits for every frame, under the progress deadline, and decodes those of a receive one by one as they come. The
  // deadline runs from the wait: on a link that is busy with messages nobody waits for, theirs is no progress of this
  // one. Throws PeerError: a transfer failed, or a frame is not the one expected (with both values).
  void finish(P2pMessage& message);

 private:
  // (peer, tag, whether it sends)
  using Key = std::tuple<int, uint32_t, bool>;
  struct Stream {
    uint32_t last = 0;  // number given
    std::deque<std::shared_ptr<P2pMessage>> under_way;
  };

  void send(P2pMessage& message);
  void receive(P2pMessage& message);
  void decode(P2pMessage& message);
  void forget(const P2pMessage& done);

  GroupContext& group_;
  std::mutex mutex_;
  std::map<Key, Stream> streams_;
};

}  // namespace lowcomm

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collective/context.h"
#include "collective/source_sink.h"
#include "messages/announcement.h"
#include "messages/p2p_message.h"

namespace lowcomm {

// A receive of a message with a tag from whichever rank sends one first. It becomes a P2pRecv once that is known.
class AnyRecv {
 public:
  // Makes the message and its sink for a sender. Called once, on any thread.
  using Make = std::function<std::pair<std::shared_ptr<P2pRecv>, std::unique_ptr<Sink>>(int peer)>;

  AnyRecv(GroupContext& group, MessageFlow flow, Make make);

  OpContext op;  // until the sender is known; the message goes on with its entry in the flight record
  const MessageFlow flow;

  // Waits for a sender, under the progress deadline; then finish the message (P2p::finish). Throws as P2p::recv, and
  // TransferError if no rank is left that could send.
  std::shared_ptr<P2pRecv> wait();

 private:
  friend class P2p;
  void settle(std::shared_ptr<P2pRecv> message, std::exception_ptr error);
  void lose(const TransportError& why);

  const Make make_;
  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::shared_ptr<P2pRecv> message_;
  std::exception_ptr error_;
  std::optional<TransportError> lost_;
};

// The messages between two ranks of one group (FORMAT.md, "Point to point").
//
// 1. The receiver posts a receive for each frame of the message that it expects, of the size of its largest one, and
//    announces the message to its sender over the control lane: flow, dtype, elements, codec, samples.
// 2. The sender encodes its message. It pairs its k-th message of a flow with the k-th announcement of the flow.
// 3. Where both mean the same message its frames leave, on the bulk lane, as soon as they are encoded and announced:
//    an announcement that came first costs no time. Where they differ as many error frames leave as there are receives:
//    both ranks raise PeerRefusal with both values, nothing was taken, and the group goes on.
//
// Messages of one flow keep their order and meet no others, so ranks may receive in another order than they send in,
// and both may send before they receive. A frame carries the message's number, by which one that is missing, stale or
// came twice is named (MessageFlow in announcement.h says for which tags). Nothing else of a message is kept once it is
// through.
//
// A message holds its encoded size in memory on each side, in frames that are at least an error frame's size.
//
// A message that cannot be encoded to its end (a NaN under nonfinite=error) is one that arrives as such: error frames
// take the place of what is left, its receiver gets the reason, its sender the ValueError when it finishes, and both go
// on, as in a collective. Looking at all elements before anything is sent would keep the link idle for as long as
// encoding them does: both are bound by reading them.
//
// Thread-safe; one message is posted once, and finished by one thread. The group keeps it until a message of its
// flow and direction is through that is not older: a holder who drops it leaves it to the transport.
class P2p {
 public:
  explicit P2p(GroupContext& group);
  ~P2p();

  // Gives the message its number and encodes it from `source`, which is not read afterwards. Does not wait for the
  // receiver.
  void send(const std::shared_ptr<P2pSend>& message, std::unique_ptr<Source> source);

  // Gives the message its number, posts its receives and announces it. `sink` takes its frames in finish(). Throws
  // TransferError.
  void recv(const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink);

  // Posts a receive from any rank. Does not wait.
  // 1. The receiver asks every other rank for a message with the tag, if it has not been answered there.
  // 2. A rank that has a message for which no receive was announced, or gets one later, offers it, once a question.
  // 3. The receiver takes the first offer that still holds (no receive by name has had the message in the meantime):
  //    from there on it is a receive from that rank. Other offers are kept for the next such receive.
  void recvAny(const std::shared_ptr<AnyRecv>& recv);

  // Waits for the receiver, if it has not announced itself yet, and for every frame, under the progress deadline, and
  // decodes the frames of a receive as they arrive. The deadline begins with the wait; progress of other messages on
  // the link does not extend it. Throws the ValueError of a send that could not be encoded, PeerRefusal if the sender's
  // could not be or if the two sides mean different messages, and any other PeerError if a transfer failed or a frame
  // is not the expected one (with both values).
  //
  // A send of a tag does not wait for its last frames, which would cost a round trip: once its receiver has announced
  // itself they are the group's to deliver (LeavingFrames).
  void finish(P2pMessage& message);

  // Ends what is under way with `peer` on a block of channels, both ways, for `why`; the peer withdraws in answer. From
  // then until resume() its messages are refused, on both sides: PeerRefusal with the first cause. Sends that are not
  // announced stay behind, receives that get no message any more get error frames. Does not wait. Any number of times.
  // 1. Each side tells the other, after all that it has announced.
  // 2. Each answers the receives that were announced to it, and that it has no message for, with error frames. Once the
  //    other side's withdrawal has come there will be no more of them, and both have counted as many messages.
  void withdraw(int peer, uint32_t block, const std::string& why);

  // The first cause of a withdrawal; empty where the block's messages are taken.
  std::string withdrawn(int peer, uint32_t block);

  // Withdraws, waits until the peer has and until nothing of the block is under way, then takes messages again. Both
  // sides call it. `op` is the caller's own. Throws TransferError.
  void resume(OpContext& op, int peer, uint32_t block);

  // Breaks the waits for receivers: the bulk lane has been cancelled. Any number of times.
  void breakWaits();

  // Ends the threads that receive announcements: the control lane has been cancelled.
  void stop() { board_.stop(); }

 private:
  // (peer, flow, whether it sends)
  using Key = std::tuple<int, MessageFlow, bool>;
  // The messages under way of a key, and how many are about to be: a flow goes when there is neither.
  struct Flow {
    std::mutex in_order;  // posts one at a time: a flow's numbers are its order on the link
    size_t posting = 0;
    std::deque<std::shared_ptr<P2pMessage>> under_way;
    // In a receiver: the last number given, and whether its sender is known to count the tag by itself.
    uint32_t last = 0;
    bool counted = false;
    // In a sender: messages and announcements that wait for each other; one of the two is empty.
    std::deque<std::shared_ptr<P2pSend>> unannounced;
    std::deque<Announcement> announced;
    std::mutex pairing;  // frames of one message at a time are handed over
  };
  // Pins a flow's map entry while a thread uses it; the last user erases it.
  class FlowLock {
   public:
    FlowLock(P2p& p2p, const Key& key);
    ~FlowLock();
    FlowLock(const FlowLock&) = delete;
    FlowLock& operator=(const FlowLock&) = delete;
    Flow& flow() { return *flow_; }

   private:
    P2p& p2p_;
    const Key key_;
    Flow* flow_;
  };
  class AnySource;
  class Withdrawals;  // messages/p2p_parts.h has both

  void post(Flow& flow, const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink, bool of_channel);
  void pair(Flow& flow);
  void received(int peer, Announcement announcement);
  void lost(int peer, const TransportError& why);
  std::shared_ptr<P2pMessage> underWay(int peer, uint32_t first_tag);
  std::exception_ptr finishRecv(P2pRecv& message);
  void adopt(P2pRecv& message, uint32_t number);
  void takeDown(P2pRecv& message);
  void forget(P2pMessage& done);
  void close(const Key& key, Flow& flow);
  static Key keyOf(const P2pMessage& message) { return {message.peer, message.key.flow, message.sends}; }

  GroupContext& group_;
  AnnouncementBoard board_;  // before what holds its buffers
  std::unique_ptr<AnySource> any_source_;
  std::unique_ptr<Withdrawals> withdrawals_;
  std::mutex mutex_;                   // of all below
  std::map<Key, Flow> flows_;          // an entry stays where it is
  std::map<int, SenderNumbers> sent_;  // by peer
  std::map<int, ReceiverNumbers> received_;
  std::map<int, TransportError> lost_;  // peers that announce no more
  std::map<int, MessageTags> tags_;     // of messages that this rank receives
  std::condition_variable changed_;     // a block's withdrawal has come, or lost_
};

}  // namespace lowcomm

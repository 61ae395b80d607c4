#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "collective/announcement.h"
#include "collective/context.h"
#include "collective/message_flow.h"
#include "collective/p2p_message.h"
#include "collective/sink.h"
#include "collective/source.h"

namespace lowcomm {

// The messages between two ranks of one group (FORMAT.md, "Point to point").
//
// 1. The receiver posts a receive for each frame of the message that it expects, of the size of its largest one, and
// announces
//    the message to its sender over the control lane: flow, dtype, elements, codec, samples.
// 2. The sender encodes its message. It pairs its k-th message of a flow with the k-th announcement of the flow.
// 3. Where both mean the same message its frames leave, on the bulk lane, as soon as they are encoded and announced:
//    an announcement that came first costs no time. Where they differ as many error frames leave as there are receives:
//    both ranks raise PeerRefused with both values, nothing was taken, and the group goes on.
//
// Messages of one flow keep their order and meet no others, so ranks may receive in another order than they send in,
// and both may send before they receive. A frame carries the message's number, by which one that is missing, stale or
// came twice is named (message_flow.h says for which tags). Nothing else of a message is kept once it is through.
//
// A message holds its encoded size in memory on each side, in frames that are at least an error frame's size.
//
// A message that cannot be encoded to its end (a NaN under nonfinite=error, a range beyond delta) is one that arrives
// as such: error frames take the place of what is left, its receiver gets the reason, its sender the ValueError when it
// finishes, and both go on, as in a collective. Looking at all elements before anything is sent would keep the link
// idle for as long as encoding them does: both are bound by reading them.
//
// Thread-safe; one message is posted once, and finished by one thread. The group keeps it until a message of its
// flow and direction is through that is not older: a holder who drops it leaves it to the transport.
class P2p {
 public:
  explicit P2p(GroupContext& group);
  ~P2p() { stop(); }

  // Gives the message its number and encodes it from `source`, which nobody reads afterwards. Does not wait for the
  // receiver.
  void send(const std::shared_ptr<P2pSend>& message, std::unique_ptr<Source> source);

  // Gives the message its number, posts its receives and announces it. `sink` takes its frames in finish(). Throws
  // TransferError.
  void recv(const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink);

  // Waits for the receiver, if it has not announced itself yet, and for every frame, under the progress deadline, and
  // decodes those of a receive one by one as they come. The deadline runs from the wait: on a link that is busy with
  // messages nobody waits for, theirs is no progress of this one. Throws the ValueError of a send that could not be
  // encoded, PeerRefused where the sender's could not or the two sides mean different messages, and any other PeerError
  // where a transfer failed or a frame is not the one expected (with both values).
  void finish(P2pMessage& message);

  // Breaks the waits for receivers: the bulk lane has been given up. Any number of times.
  void cancel();

  // Ends the threads that hear announcements: the control lane has been cancelled.
  void stop() { board_.stop(); }

 private:
  // (peer, flow, whether it sends)
  using Key = std::tuple<int, MessageFlow, bool>;
  // The messages under way of a key, and how many are about to be: a flow goes when there is neither.
  struct Flow {
    std::mutex in_order;  // posts one at a time: a flow's numbers are its order on the link
    size_t posting = 0;
    std::deque<std::shared_ptr<P2pMessage>> under_way;
    // Of a receiver: the number given last, and whether its sender is known to count the tag by itself.
    uint32_t last = 0;
    bool counted = false;
    // Of a sender: messages and announcements that wait for each other; one of the two is empty.
    std::deque<std::shared_ptr<P2pSend>> unannounced;
    std::deque<Announcement> announced;
    std::mutex pairing;  // frames of one message at a time are handed over
  };
  // A flow while one is posted to it.
  class FlowLock;

  void pair(Flow& flow);
  void heard(int peer, Announcement announcement);
  void lost(int peer, const TransportError& why);
  std::exception_ptr finishSend(P2pSend& message);
  std::exception_ptr finishRecv(P2pRecv& message);
  void adopt(P2pRecv& message, const FrameHeader& got);
  void takeDown(P2pRecv& message);
  void forget(const P2pMessage& done);
  void close(const Key& key, Flow& flow);
  static Key keyOf(const P2pMessage& message) { return {message.peer, message.key.flow, message.sends}; }

  GroupContext& group_;
  AnnouncementBoard board_;  // first: messages hold its buffers
  std::mutex mutex_;         // of all below
  std::map<Key, Flow> flows_;
  std::map<int, SenderNumbers> sent_;  // by peer
  std::map<int, ReceiverNumbers> received_;
  std::map<int, TransportError> lost_;  // peers that announce no more
};

}  // namespace lowcomm

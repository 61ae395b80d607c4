#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "messages/p2p.h"

namespace lowcomm {

// The parts of P2p that have state of their own. All share its mutex_, in addition to the locks named here; "with the
// lock" is mutex_.

// Receives from any rank (P2p::recvAny).
class P2p::AnySource {
 public:
  explicit AnySource(P2p& p2p) : p2p_(p2p) {}

  void recv(const std::shared_ptr<AnyRecv>& recv);

  // The board's handler of a question or an offer.
  void received(int peer, const AnySourceMessage& message);

  // Tells a rank that has asked, once, that the next receive of the flow that it announces will have a message.
  void offer(int peer, const MessageFlow& name);

  // With the lock. Counts a receive of the flow that this rank, or the peer, has announced.
  void countOwn(int peer, const MessageFlow& name);
  void countTheirs(int peer, const MessageFlow& name);

  // With the lock. Fails the receives that wait, if no peer is left that could send.
  void lose(const TransportError& why);

 private:
  // Receives of a tag from any rank: those that wait, and the ranks that have a message, in the order of their offers.
  struct Receives {
    struct Peer {
      bool asked = false;                    // and the answer has not been made use of
      uint32_t announced = 0;                // receives of the flow, since it was asked
      std::optional<uint32_t> offered = {};  // the same number as the sender has it
      AnnouncementBoard::Delivery question = {};
    };
    std::map<int, Peer> peers;
    std::deque<int> offers;
    std::deque<std::shared_ptr<AnyRecv>> waiting;
  };
  // A peer's question for a message.
  struct Wanted {
    uint32_t announced = 0;  // receives of the flow, since then
    bool answered = false;
    AnnouncementBoard::Delivery offer = {};
  };

  void choose(const MessageFlow& name);

  P2p& p2p_;
  std::mutex choosing_;  // of senders; before a flow's in_order
  std::mutex offering_;
  std::map<MessageFlow, Receives> receives_;              // with the lock
  std::map<std::pair<int, MessageFlow>, Wanted> wanted_;  // with the lock
};

// Withdrawals from blocks of channels (P2p::withdraw).
class P2p::Withdrawals {
 public:
  explicit Withdrawals(P2p& p2p) : p2p_(p2p) {}

  // A block of channels between this rank and a peer.
  struct Block {
    std::mutex announcing;  // of receives, one at a time
    uint32_t period = 0;
    bool closed = false;       // this rank has withdrawn
    bool peer_closed = false;  // the peer has withdrawn, and all its receives are answered
    std::string why;
    std::optional<std::string> next;  // why the peer has withdrawn from the next period, which has not begun here
    AnnouncementBoard::Delivery delivery;
  };

  void withdraw(int peer, uint32_t number, const std::string& why);
  std::string withdrawn(int peer, uint32_t number);
  void resume(OpContext& op, int peer, uint32_t number);

  // The board's handler of the peer's withdrawal.
  void received(int peer, const Withdrawal& theirs);

  // For a withdrawn flow: sends that wait for a receive stay queued; receives that wait for a send are refused after
  // the frames of earlier messages.
  void refuseRest(int peer, const MessageFlow& name);

  Block& block(int peer, uint32_t number);

  // With the lock. Throws PeerRefusal if the message's block is withdrawn.
  void expectTaken(const P2pMessage& message);

  // With the lock. Whether announcements of the flow are refused now.
  bool refuses(int peer, const MessageFlow& name);

 private:
  bool close(Block& block, const std::string& why);
  void tell(int peer, uint32_t number, Block& block);
  void answered(int peer, uint32_t number, Block& block);
  void refuseAll(int peer, uint32_t block);
  std::vector<Key> keysOf(int peer, uint32_t block);

  P2p& p2p_;
  std::map<std::pair<int, uint32_t>, Block> blocks_;  // with the lock
};

}  // namespace lowcomm

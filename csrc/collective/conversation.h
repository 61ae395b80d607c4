#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collective/context.h"
#include "transport/transport.h"

namespace lowcomm {

class OpContext;

// The frames of one op between this rank and its peers on the bulk lane: their transfers, their buffers and their
// numbers. Frame 0 of either direction is the description of the op; the number picks the connection. A failed transfer
// throws TransferError. The worker's thread alone.
class Conversation {
 public:
  // Receives are posted for `ahead` rounds at a time, at most SendWindow::kMost.
  Conversation(OpContext& op, size_t ahead);

  // Peers in the order that a rank sends to them, and that in which it hears from them: distance 1 ... size - 1.
  int to(int distance) const { return (rank_ + distance) % size_; }
  int from(int distance) const { return (rank_ - distance + size_) % size_; }

  // Posts the receive of the description, and of the frame of round r.
  void postDescription(int peer);
  void post(int peer, size_t r);

  // Waits for what was posted. The bytes are valid until the next post to the same place.
  std::span<std::byte> takeDescription(int peer);
  std::span<std::byte> take(int peer, size_t r);

  // The frames of round r to peers, at least `count` of them. Round r - ahead must have been given back.
  std::vector<OutgoingFrame>& outgoing(size_t r, size_t count);

  // Waits until the frames of all rounds before r have left, and gives their buffers back.
  void giveBackBefore(size_t r);

  // Memory for one frame of at most `bytes`, which takes a buffer where the frame has none. Nothing of the frame may be
  // under way.
  std::byte* memoryOf(OutgoingFrame& frame, size_t bytes);

  // Hands the first `bytes` of a frame to the transport.
  void send(OutgoingFrame& frame, int peer, size_t bytes);

  // Waits until a frame has arrived.
  void settle(OutgoingFrame& frame);

  // Waits until so few of these frames, and of those of rounds, have yet to arrive that the group takes them
  // (LeavingFrames).
  void leave(std::vector<OutgoingFrame> frames);

  // Frames, the description among them, that were sent to a peer, and that receives were posted for.
  uint32_t sent(int peer) const { return peers_[peer].sent; }
  uint32_t posted(int peer) const { return peers_[peer].posted; }

  // Waits for all frames of rounds that were posted, and for more until `frames` have come, and drops them.
  void ignore(int peer, uint32_t frames);

 private:
  struct IncomingFrame {
    BufferPool::Buffer buffer;
    std::unique_ptr<Transfer> receiving;
  };
  struct Peer {
    IncomingFrame description;
    std::array<IncomingFrame, SendWindow::kMost> rounds;
    uint32_t sent = 0, posted = 0;  // frames, the description among them
    uint32_t taken = 0;             // of those posted, waited for
  };

  void post(int peer, IncomingFrame& frame);
  std::span<std::byte> take(int peer, IncomingFrame& frame, const char* doing);
  uint32_t tagOf(uint32_t number) const;

  OpContext& op_;
  const int rank_, size_;
  const size_t ahead_;
  std::vector<Peer> peers_;                                             // by rank
  std::array<std::vector<OutgoingFrame>, SendWindow::kMost> outgoing_;  // by round, modulo ahead_
  size_t given_back_ = 0;                                               // rounds
};

}  // namespace lowcomm

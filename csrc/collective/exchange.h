#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "wire/key_values.h"

namespace lowcomm {

class OpContext;
class Phase;

// The base of every collective: each rank sends the frames of its messages to its peers and receives theirs, a round
// being at most one frame to and from each peer. Receives are posted before sends, several rounds are under way at a
// time (SendWindow in context.h), and a round is encoded while the ones before it travel.
//
// The conversation with a peer is: one control frame that describes the op, then the frames. Ranks that disagree find
// out by the descriptions: each throws PeerRefusal with both values, nothing is taken, and the group goes on. A rank
// that cannot encode (a NaN) sends error frames in place of what is left, so every posted receive still completes,
// every rank it still talks to gets the error, and the group goes on.
struct Exchange {
  // Ranks must agree on it: op, dtype, sizes, codec, reduce op.
  KeyValues description;

  // One additional field for each rank, which describes this rank and that one and is equal on both; may be empty.
  std::vector<std::pair<std::string, std::string>> pair_fields = {};

  std::vector<Phase*> phases = {};  // in order; they live until the end of the exchange

  // Whether the messages are cut by the speed of the ranks' links (LinkShares). Then what each rank knows of its own is
  // the last field of its description, which ranks do not compare, and where all ranks know theirs the group's next
  // ops are cut by that. A large exchange is measured when it is over.
  //
  // A group of two ranks leaves it false: whatever its slice is, each rank sends and receives one tensor.
  bool cut_by_links = false;
};

// Runs it to the end. Throws ValueError when this rank's own data could not be encoded, PeerRefusal when a peer's could
// not or ranks describe different ops: the group goes on after each. Any other PeerError means that a peer or the
// network failed and the lane is lost.
void runExchange(OpContext& op, const Exchange& exchange);

struct MessagePlan;

// The payloads of one round, by rank; empty where a rank has none.
using Payloads = std::vector<std::span<const std::byte>>;

// Some rounds of an exchange in which every rank has one role: a message from or to each peer. Round k carries frame k
// of every message that has as many frames. A subclass is a role: it says who sends whom which message, makes the
// frames, and takes those that come. The worker calls all of it, at most once for each frame.
class Phase {
 public:
  Phase() = default;
  virtual ~Phase() = default;
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

  // The messages that this rank sends to and gets from each rank; null is nothing. Its own entries are what it keeps:
  // nothing of them travels, but their frames are rounds too. A message is cut in the same way by its sender and its
  // receiver. A role sets these when it is made; the plans live until the end of the exchange.
  std::vector<const MessagePlan*> out, in;

  // Whether all of `out` is one message of the same bytes: encoded once.
  bool same_to_all = false;

  // Whether its rounds take turns with those of the phase before, round k behind that one's round k + 1, in place of
  // following its last. Only where readyAfter(k) is k + 1, and the same on all ranks.
  bool takes_turns = false;

  // How many rounds of the phase before this one must be absorbed before frame k can be made; 0: none.
  virtual size_t readyAfter(size_t /*k*/) const { return 0; }

  // Begins the work of `check` and `encode` of round k, for elements that a device encodes (collective/device_codec.h):
  // called once the data of the round is there, in order, up to a round ahead of them. ValueError as in `encode`.
  virtual void start(size_t /*k*/) {}

  // Looks at the elements of round k that this rank keeps, before any of the round is encoded. Called in a group of one
  // rank too, where nothing is encoded for a peer. ValueError as in `encode`.
  virtual void check(size_t /*k*/) {}

  // Writes the payload of frame k of out[peer] (any peer when same_to_all). ValueError: this rank's data cannot be
  // sent.
  virtual void encode(size_t k, int peer, std::span<std::byte> payload) = 0;

  // Takes the payloads of round k; this rank's own is the one it sent when same_to_all, else empty. Bytes that do not
  // decode are to be attributed to their sender (OpContext::attribute).
  virtual void absorb(size_t k, const Payloads& payloads) = 0;

  // Rounds it takes: the frames of the longest message.
  size_t rounds() const;
};

// Messages for `out` or `in` of a phase: one of `rank`, none of the other ranks.
std::vector<const MessagePlan*> onlyFor(int rank, int ranks, const MessagePlan* plan);

// A frame to each peer and one from each: the step of an exchange.
struct Round {
  Phase* phase;
  size_t k;      // counted in the phase
  size_t needs;  // rounds of the exchange that must be over before this one's frames are made
};

// The rounds of all phases, in their order (Phase::takes_turns).
std::vector<Round> roundsOf(const std::vector<Phase*>& phases);

// How many rounds' frames to or from a peer of `rank` there is room for at once: half of the longest message, or of
// half the exchange where that is many short ones, from 4 to SendWindow::kMost. The memory for all peers is then less
// than what is exchanged.
size_t roundsAhead(const std::vector<Phase*>& phases, int rank);

}  // namespace lowcomm

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "wire/key_values.h"

namespace lowcomm {

class OpContext;
class Phase;

// The base of every collective: each rank sends the frames of its messages to its peers and receives theirs, a round
// being at most one frame to and from each peer. Receives are posted before sends, several rounds are under way at a
// time (send_window.h), and a round is encoded while the ones before it travel.
//
// The conversation with a peer is: one control frame that describes the op, then the frames. Ranks that disagree find
// out by the descriptions: each throws PeerRefused with both values, nothing is taken, and the group goes on. A rank
// that cannot encode (a NaN) sends error frames in place of what is left, so every posted receive still completes,
// every rank it still talks to gets the error, and the group goes on.
struct Exchange {
  // Ranks must agree on it: op, dtype, sizes, codec, reduce op.
  KeyValues description;

  // By rank, one more field for this rank and that one, the same on both; empty: none.
  std::vector<std::pair<std::string, std::string>> pair_fields = {};

  std::vector<Phase*> phases = {};  // in order; they live until the end of the exchange
};

// Runs it to the end. Throws ValueError when this rank's own data could not be encoded, PeerRefused when a peer's could
// not or ranks describe different ops: the group goes on after each. Any other PeerError means that a peer or the
// network failed and the lane is lost.
void runExchange(OpContext& op, const Exchange& exchange);

}  // namespace lowcomm

#pragma once

#include <cstdint>
#include <map>

#include "collective/context.h"

namespace lowcomm {

// The frames of one op between this rank and a peer, descriptions among them.
struct FrameCounts {
  uint32_t sent = 0;      // by this rank to the peer
  uint32_t expected = 0;  // from the peer: receives that this rank has posted
};

// Exchanges the counts of an op with peers that describe another op, over the control lane, so that both sides can
// answer every receive that the other has posted. `mine` and the result are by peer; every peer calls it with this rank
// among its own. Throws PeerError: a transfer failed, or a peer sent something else.
std::map<int, FrameCounts> exchangeFrameCounts(OpContext& op, const std::map<int, FrameCounts>& mine);

}  // namespace lowcomm

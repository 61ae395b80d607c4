#include "collective/context.h"

#include <utility>

#include "collective/plan.h"

namespace lowcomm {

GroupContext::GroupContext(Transport& transport, GroupConfig config)
    : transport(transport),
      name(std::move(config.group)),
      global_ranks(std::move(config.global_ranks)),
      epoch(config.epoch),
      chunk_bytes(config.chunk_bytes),
      connections(config.connections),
      ring_from(config.ring_from),
      timeout_ms(config.timeout.count()),
      frames(frameCapacity(config.chunk_bytes)),
      window(transport.size() - 1) {}

std::string GroupContext::rankName(int rank) const {
  std::string name = "rank " + std::to_string(rank);
  if (rank >= 0 && static_cast<size_t>(rank) < global_ranks.size()) {
    name += " (global " + std::to_string(global_ranks[rank]) + ")";
  }
  return name;
}

}  // namespace lowcomm

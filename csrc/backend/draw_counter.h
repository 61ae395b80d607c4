#pragma once

#include <atomic>
#include <cstdint>

#include "backend/group.h"
#include "codec/codec.h"

namespace lowcomm {

// The numbers a stochastic codec draws by, for callers that keep count of tensors and steps themselves.
struct Counter {
  uint64_t slot =
      0;  // the tensor's number within the step; a layout uses one a segment, a reduce_scatter one a slice too
  uint32_t step = 0;
};

// Counts what a group's stochastic codecs draw by, so that no two encodes share their draws. Thread-safe.
class DrawCounter {
 public:
  // Ops under a policy draw from the slots below this, which no op has tensors and ranks enough to reach, layouts from
  // those above.
  static constexpr uint64_t kLayoutSlots = 1ull << 32;

  // Point-to-point messages draw in the steps from here on, one each; no op's sequence number comes so far.
  static constexpr uint32_t kP2pSteps = 1u << 31;

  // `group` outlives this.
  explicit DrawCounter(const Group& group) : group_(group) {}

  // The key of this group's random draws: the seed mixed with the group's name, so that no two groups of a rank share
  // them.
  uint64_t key() const;

  // This rank's draws in a step, from slot 0 on. They follow its rank in the world: groups of other ranks (the replicas
  // of HSDP) must not share them.
  Draws ofStep(uint32_t step) const;

  // Those of the next point-to-point message that is sent.
  Draws ofNextMessage() { return ofStep(kP2pSteps + messages_++ % kP2pSteps); }

  // Reserves `count` consecutive slots for layouts' draws and returns the first.
  uint64_t reserveSlots(uint64_t count) { return kLayoutSlots + slots_.fetch_add(count); }

 private:
  const Group& group_;
  std::atomic<uint64_t> slots_{0};
  std::atomic<uint32_t> messages_{0};
};

}  // namespace lowcomm

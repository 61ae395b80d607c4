#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "diloco/fragment.h"
#include "engine/op_queue.h"

namespace lowcomm {

// The ranks of a stripe after they have met: those with the most outer steps, which have the same θ̄, and the others.
struct StripeRanks {
  std::vector<int> ahead, behind;

  bool isBehind(int rank) const;

  // Collective over the group: compares outer steps that are applied, and checksums of θ̄. Throws as runExchange.
  static StripeRanks compare(OpQueue& group, int64_t applied, uint32_t checksum);
};

// A fragment of a stripe on its way from the ranks that are ahead, each tensor from another of them in turn, to all
// that are behind. A rank that gives goes on at once: its next op of the group comes after this one, and an error of
// this one ends the group. One thread.
class Handover {
 public:
  // Queues the op, which is collective over the group. `fragment` outlives this, and is idle.
  Handover(OpQueue& group, const StripeRanks& ranks, Fragment& fragment);

  // Whether this rank takes the fragment over, once op() has ended; else it gives what others take.
  bool takes() const { return takes_; }
  Ticket& op() { return op_; }

  // Ends it on a rank that gives or takes: writes what came to the fragment, and moves the parameters to it. Returns
  // the bytes that were taken.
  uint64_t finish();

 private:
  using Parcels = std::vector<at::Tensor>;  // by the rank that they come from, fp32 in host memory of their own
  std::vector<int64_t> elements(int ranks) const;
  void copy(int from, bool out) const;

  Fragment& fragment_;
  std::vector<at::Tensor> tensors_;
  std::vector<int> sources_;  // of the tensors
  bool takes_;
  std::shared_ptr<Parcels> parcels_;  // of the op, too, which may end after the rank that gives has gone on
  Ticket op_;
};

}  // namespace lowcomm

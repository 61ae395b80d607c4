#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "collective/all_reduce.h"
#include "collective/context.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/plan.h"

namespace lowcomm {

// How one all_reduce's tensor is shared out among the ranks, and the codes of the slice that this rank reduces: what
// comes before any arithmetic, whoever does that, the host or a device.
class ReducedSlices {
 public:
  // `message` lives as long as this.
  ReducedSlices(const OpContext& op, const AllReduceMessage& message);

  const RankPlans& plans() const { return plans_; }
  const MessagePlan& own() const { return plans_.of(rank_); }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // By the tensor's elements, not the slices'.
  MessageSummary described() const;

  // Fp32, fp16 or bf16 bytes that would have crossed: everybody's slices, then its own to everybody.
  uint64_t rawBytes() const;

  // Of a slice: its first element's number and where it stands in the tensor, unless the message has places.
  uint64_t first(int rank) const { return slices_[rank].first; }
  std::byte* elements(int rank) const;

  // Where a run of a slice stands.
  std::byte* elements(int rank, const Run& run) const;

  // elements(r) of every rank r: what Contributions reads. None where the message has places.
  std::vector<const void*> inputs() const;

  // Codes of a whole run of the own slice, given the number of the frame that its last part is in.
  std::span<std::byte> codes(size_t k, const Run& run);

  // The first phase without its functions: every rank sends every other the slice that it reduces.
  Phase scatter() const;

  // The second without its absorb: the own slice's codes go to everybody, each frame once its runs are whole.
  Phase gather();

  // Both, complete, to an exchange.
  static void add(Exchange& exchange, Phase scatter, Phase gather);

 private:
  const int rank_, ranks_;
  const AllReduceMessage& message_;
  const std::vector<Slice> slices_;
  const RankPlans plans_;
  std::vector<size_t> starts_;    // by frame of the own slice: where its payload is in codes_
  std::vector<std::byte> codes_;  // of the own slice, reduced
};

}  // namespace lowcomm

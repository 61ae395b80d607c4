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
#include "collective/phase.h"
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

  // Frame k of the codes.
  void copyCodes(size_t k, std::span<std::byte> payload) const;

 private:
  const int rank_, ranks_;
  const AllReduceMessage& message_;
  const std::vector<Slice> slices_;
  const RankPlans plans_;
  std::vector<size_t> starts_;    // by frame of the own slice: where its payload is in codes_
  std::vector<std::byte> codes_;  // of the own slice, reduced
};

// The first phase: every rank sends every other the slice that it reduces. Of Tensor: start, encode and reduce.
template <class Tensor>
class SendSlices final : public Phase {
 public:
  SendSlices(Tensor& tensor, const ReducedSlices& slices) : tensor_(tensor) {
    out = slices.plans().all();
    in.assign(slices.ranks(), &slices.own());
  }

  void start(size_t k) override { tensor_.start(k); }
  void encode(size_t k, int peer, std::span<std::byte> payload) override { tensor_.encode(k, peer, payload); }
  void absorb(size_t k, const Payloads& payloads) override { tensor_.reduce(k, payloads); }

 private:
  Tensor& tensor_;
};

// The second: the codes of the own slice's sums go to all, each frame once its runs are whole. Of Tensor: encodeSums
// and take.
template <class Tensor>
class SendSums final : public Phase {
 public:
  SendSums(Tensor& tensor, const ReducedSlices& slices) : tensor_(tensor), slices_(slices) {
    out.assign(slices.ranks(), &slices.own());
    in = slices.plans().all();
    same_to_all = true;
  }

  size_t readyAfter(size_t k) const override {
    return 1 + (k < slices_.own().frames.size() ? slices_.own().wholeWith(k) : k);
  }
  void encode(size_t k, int /*peer*/, std::span<std::byte> payload) override { tensor_.encodeSums(k, payload); }
  void absorb(size_t k, const Payloads& payloads) override {
    for (int rank = 0; rank < slices_.ranks(); ++rank) {
      if (rank != slices_.rank() && !payloads[rank].empty()) tensor_.take(rank, k, payloads[rank]);
    }
  }

 private:
  Tensor& tensor_;
  const ReducedSlices& slices_;
};

}  // namespace lowcomm

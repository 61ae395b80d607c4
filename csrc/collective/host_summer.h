#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/fused.h"
#include "collective/coded_sums.h"
#include "collective/plan.h"
#include "collective/source_sink.h"
#include "collective/summer.h"

namespace lowcomm {

// Room for `bytes` in memory that is kept from op to op.
std::byte* scratch(std::vector<std::byte>& memory, size_t bytes);

// This rank's contribution to a reduction, from host memory: the slices for other ranks as payloads, its own as
// elements. Scaled, and with error feedback, where the reduction and the entries say so.
class Contributions {
 public:
  // Throws as makeSummer for residuals, dtypes and kinds.
  Contributions(OpContext& op, const SumElements& elements);

  // Throws NonFiniteError where the codec of this rank's own slice would: the slice is not encoded, so no codec looks
  // at it, and a NaN there would reach the result unseen.
  void checkOwn(size_t k);
  void checkOwn(const Run& run);

  // The payload of frame k for `peer`. A residual becomes what this encoding loses.
  void encode(size_t k, int peer, std::span<std::byte> payload);

  // This rank's elements of its own slice, of ownType(): scaled or with their residual, which becomes 0. A poisoned
  // bucket's NaN and infinities reach the sum as they are. Valid until the next call.
  const void* own(const Run& run);
  DType ownType(const Run& run) const;

  // Where the residual of a run of the slice for `peer` is written, or null, and what its encoding draws. One that is
  // kept in codes has a place until the next run's; keep() keeps it.
  float* residualOf(const Run& run, int peer);
  void keep(const Run& run, int peer);
  Draws drawsOf(const Run& run, int peer) const;

  // The codec of a run with the arithmetic around it.
  FusedCodec& fused(const Run& run);

 private:
  const ScatterEntry& entry(const Run& run, int peer) const { return elements_.entries[peer][run.segment]; }
  const void* contribution(const Run& run, int peer);
  float* takeResidual(const Run& run, int peer);
  void encodeRun(size_t k, const Run& run, int peer, const std::string& of, std::span<std::byte> payload);
  void withFeedback(const void* x, const float* residual, const Window& window);
  void addLost(Loss& loss, const float* residual, const Window& window);

  OpContext& op_;
  const SumElements elements_;
  std::optional<FusedCodec> fused_;
  std::vector<float> own_;                // own elements with their residual
  std::vector<float> residual_;           // of a run, where residuals are kept in codes
  std::vector<float> encoded_, decoded_;  // of the loss's sample
  OutgoingParts parts_;
};

// Sums of elements in host memory.
class HostSummer final : public Summer {
 public:
  HostSummer(OpContext& op, const SumElements& elements);

  void start(size_t /*k*/) override {}
  void check(size_t k) override;
  void encode(size_t k, int peer, std::span<std::byte> payload) override { contributions_.encode(k, peer, payload); }
  void absorb(size_t k, const Payloads& payloads) override;
  void encodeSums(size_t k, std::span<std::byte> payload) override;
  void takeSums(int owner, size_t k, std::span<const std::byte> payload) override;

 private:
  std::byte* output(int owner, const Run& run) const;
  std::byte* decoded(int owner, const Run& run);
  void sum(const Run& run, const Payloads& payloads);
  void encodeSum(const Run& run, std::span<std::byte> codes, const Payloads& payloads);
  void attribute(const Run& run, const Payloads& payloads) const;

  OpContext& op_;
  const SumElements elements_;
  const MessagePlan& own_;  // this rank's slice
  const int average_over_;  // 0: a sum
  Contributions contributions_;
  IncomingParts slices_, sums_;        // of contributions to the own slice, and of the sums of others
  std::optional<SumCodes> own_codes_;  // where nobody else keeps them
  SumCodes* codes_ = nullptr;          // of an all_reduce of codes
};

}  // namespace lowcomm

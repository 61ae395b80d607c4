#pragma once

#include <optional>
#include <vector>

#include "collective/contributions.h"
#include "collective/summer.h"

namespace lowcomm {

// Sums of elements in host memory.
class HostSummer final : public Summer {
 public:
  HostSummer(OpContext& op, const SumElements& elements);

  void start(size_t /*k*/) override {}
  void check(size_t k) override;
  void encode(size_t k, int peer, std::span<std::byte> payload) override { contributions_.encode(k, peer, payload); }
  void absorb(size_t k, const Payloads& payloads) override;
  void encodeSums(size_t k, std::span<std::byte> payload) override { codes_->copy(k, payload); }
  void takeSums(int owner, size_t k, std::span<const std::byte> payload) override;

 private:
  std::byte* output(int owner, const Run& run) const;
  void sum(const Run& run, const Payloads& payloads);
  void encodeSum(const Run& run, std::span<std::byte> codes, const Payloads& payloads);
  void attribute(const Run& run, const Payloads& payloads) const;

  OpContext& op_;
  const SumElements elements_;
  const MessagePlan& own_;  // this rank's slice
  const int average_over_;  // 0: a sum
  Contributions contributions_;
  IncomingParts slices_, sums_;    // of contributions to the own slice, and of the sums of others
  std::optional<SumCodes> codes_;  // of an all_reduce
};

}  // namespace lowcomm

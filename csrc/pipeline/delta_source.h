#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/fused.h"
#include "collective/plan.h"
#include "collective/source.h"
#include "pipeline/sample_update.h"

namespace lowcomm {

// Mean sizes of what a sender had to say of samples that it had seen before: sums over a part of each run.
struct DeltaSizes {
  double values = 0;   // of |a|
  double changes = 0;  // of |a - m|
  uint64_t seen = 0;   // samples that travelled as changes
  uint64_t first = 0;  // and those that did for the first time
};

// The sender's side of AQ-SGD (NeurIPS 2022, Algorithm 2): c = Q(a - m), m += deq(c) of samples seen before; Q'(a),
// m = deq'(Q'(a)) of others. `plan`, `data` and `update` outlive it.
class DeltaSource final : public Source {
 public:
  // `data`: a of all samples, plan.dtype, in host memory. `sizes`, unless null, is added to.
  DeltaSource(const MessagePlan& plan, const void* data, SampleUpdate& update, const Draws& draws, DeltaSizes* sizes);

  void encode(size_t k, std::span<std::byte> payload) override;

 private:
  void encodeRun(const Run& run, std::span<std::byte> whole);
  void measure(const Run& run, const std::byte* a);

  const MessagePlan& plan_;
  const std::byte* const data_;
  SampleUpdate& update_;
  const Draws draws_;
  DeltaSizes* const sizes_;
  OutgoingParts parts_;
  std::vector<std::unique_ptr<FusedCodec>> fused_;  // by segment
  std::vector<float> decoded_;
};

}  // namespace lowcomm

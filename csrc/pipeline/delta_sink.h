#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "codec/fused.h"
#include "collective/op_context.h"
#include "collective/plan.h"
#include "collective/sink.h"
#include "pipeline/sample_update.h"

namespace lowcomm {

// The receiver's side of AQ-SGD (NeurIPS 2022, Algorithm 2): y = m + deq(c) of samples seen before, y = deq'(c) of
// others, and m becomes y as the sender's does. y is not what m was rounded to. `op`, `plan`, `data` and `update`
// outlive it.
class DeltaSink final : public Sink {
 public:
  // `data`: room for y of all samples, plan.dtype, in host memory.
  DeltaSink(OpContext& op, const MessagePlan& plan, void* data, SampleUpdate& update);

  void take(size_t k, std::span<const std::byte> payload, int sender) override;

 private:
  void decodeRun(const Run& run, std::span<const std::byte> whole);

  OpContext& op_;
  const MessagePlan& plan_;
  std::byte* const data_;
  SampleUpdate& update_;
  IncomingParts parts_;
  std::vector<std::unique_ptr<FusedCodec>> fused_;  // by segment
  std::vector<float> decoded_;
};

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/fused.h"
#include "collective/op_context.h"
#include "collective/plan.h"
#include "collective/source_sink.h"
#include "pipeline/sample_update.h"

namespace lowcomm {

// The sender's side of AQ-SGD (NeurIPS 2022, Algorithm 2): c = Q(a - m), m += deq(c) of samples seen before; Q'(a),
// m = deq'(Q'(a)) of others. `op`, `plan`, `data` and `update` outlive it.
class DeltaSource final : public Source {
 public:
  // `data`: a of all samples, plan.dtype, in host memory. Sizes of changes, and what encoding loses of them, are
  // counted in `op`.
  DeltaSource(OpContext& op, const MessagePlan& plan, const void* data, SampleUpdate& update, const Draws& draws);

  void encode(size_t k, std::span<std::byte> payload) override;

 private:
  void encodeRun(size_t k, const Run& run, std::span<std::byte> whole);
  std::optional<Window> measure(size_t k, const Run& run, const std::byte* a, Elements m, const Draws& draws);

  OpContext& op_;
  const MessagePlan& plan_;
  const std::byte* const data_;
  SampleUpdate& update_;
  const Draws draws_;
  OutgoingParts parts_;
  std::vector<std::unique_ptr<FusedCodec>> fused_;  // by segment
  std::vector<float> decoded_, change_;
};

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

#include "collective/summer.h"

#include <cmath>
#include <cstring>

#include "collective/host_summer.h"
#include "collective/op_context.h"
#include "collective/staged.h"
#include "kernels/reduce.h"

namespace lowcomm {

std::unique_ptr<Summer> makeSummer(OpContext& op, DeviceCodec* device_codec, const SumElements& elements) {
  if (device_codec) return std::make_unique<StagedSummer>(op, *device_codec, elements);
  return std::make_unique<HostSummer>(op, elements);
}

std::string sliceFor(int rank) {
  return "of the slice for rank " + std::to_string(rank);
}

void reduceAlone(const ScatterEntry& entry, const CodecSpec& spec, DType dtype, const Reduction& reduction) {
  const auto codec = makeCodec(spec);
  const uint64_t n = entry.count;
  codec->expectTaken(entry.output, dtype, 0, n, "");
  if (reduction.premultiplied) scale(entry.output, entry.output, dtype, reduction.premultiply, n);
  if (codec->needsRepair(entry.output, dtype, n)) codec->repair(entry.output, dtype, n);
  if (!entry.residual) return;
  std::vector<float> rounded(n);
  reduceInto(entry.residual, entry.output, dtype, ReduceKind::sum, n);
  reduceFinish(entry.output, entry.residual, dtype, n, 0);
  reduceAssign(rounded.data(), entry.output, dtype, n);
  for (uint64_t i = 0; i < n; ++i) {
    const float left = entry.residual[i] - rounded[i];
    entry.residual[i] = std::isfinite(left) ? left : 0;  // as FusedCodec keeps it
  }
}

SendSlices::SendSlices(const OpContext& op, const RankPlans& slices, Summer& summer) : summer_(summer) {
  out = slices.all();
  in.assign(op.size(), &slices.of(op.rank()));
}

SumCodes::SumCodes(const MessagePlan& slice) : slice_(slice) {
  size_t bytes = 0;
  for (const Frame& frame : slice.frames) {
    starts_.push_back(bytes);
    bytes += frame.payload_bytes;
  }
  bytes_.resize(bytes);
}

std::span<std::byte> SumCodes::of(size_t k, const Run& run) {
  size_t at = starts_[k];
  for (const Run& before : slice_.frames[k].runs) {
    if (&before == &run) break;
    at += before.bytes;
  }
  return std::span(bytes_).subspan(at - run.part, run.whole);
}

void SumCodes::copy(size_t k, std::span<std::byte> payload) const {
  std::memcpy(payload.data(), bytes_.data() + starts_[k], payload.size());
}

}  // namespace lowcomm

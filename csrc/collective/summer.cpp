#include "collective/summer.h"

#include <cmath>

#include "base/error.h"
#include "codec/coded_residual.h"
#include "collective/host_summer.h"
#include "collective/op_context.h"
#include "collective/staged.h"

namespace lowcomm {

std::unique_ptr<Summer> makeSummer(OpContext& op, DeviceCodec* device_codec, const SumElements& elements) {
  if (!device_codec) return std::make_unique<HostSummer>(op, elements);
  for (const std::vector<ScatterEntry>& slice : elements.entries) {
    for (const ScatterEntry& entry : slice) {
      if (entry.make || entry.feedback())
        throw ValueError(op.op + ": on a device: expected elements there and no error feedback, got others");
    }
  }
  return std::make_unique<StagedSummer>(op, *device_codec, elements);
}

std::string sliceFor(int rank) {
  return "of the slice for rank " + std::to_string(rank);
}

void reduceAlone(const ScatterEntry& entry, const CodecSpec& spec, DType dtype, const Reduction& reduction) {
  const auto codec = makeCodec(spec);
  const uint64_t n = entry.count;
  codec->expectTaken(entry.output, dtype, 0, n, "");
  if (reduction.premultiplied) scale(entry.output, entry.output, dtype, reduction.premultiply, n);
  if (!entry.feedback()) return;
  std::vector<float> rounded(n), wide(entry.coded ? n : 0);
  float* residual = entry.coded ? wide.data() : entry.residual;
  if (entry.coded) entry.coded->read(entry.first, n, residual);
  reduceInto(residual, entry.output, dtype, ReduceKind::sum, n);
  reduceFinish(entry.output, residual, dtype, n, 0);
  reduceAssign(rounded.data(), entry.output, dtype, n);
  for (uint64_t i = 0; i < n; ++i) {
    const float left = residual[i] - rounded[i];
    residual[i] = std::isfinite(left) ? left : 0;  // as FusedCodec keeps it
  }
  if (entry.coded) entry.coded->write(entry.first, n, residual);
}

SendSlices::SendSlices(const OpContext& op, const RankPlans& slices, Summer& summer) : summer_(summer) {
  out = slices.all();
  in.assign(op.size(), &slices.of(op.rank()));
}

SendSums::SendSums(const OpContext& op, const RankPlans& slices, Summer& summer, std::optional<int> root)
    : rank_(op.rank()), own_(slices.of(rank_)), summer_(summer) {
  const bool takes = !root || *root == rank_;
  in = takes ? slices.all() : std::vector<const MessagePlan*>(op.size());
  if (!root) {
    out.assign(op.size(), &own_);
    same_to_all = true;
  } else if (takes) {
    out.resize(op.size());
  } else {
    out = onlyFor(*root, op.size(), &own_);
  }
}

void SendSums::absorb(size_t k, const Payloads& payloads) {
  for (size_t rank = 0; rank < payloads.size(); ++rank) {
    const int owner = static_cast<int>(rank);
    if (owner != rank_ && !payloads[rank].empty()) summer_.takeSums(owner, k, payloads[rank]);
  }
}

}  // namespace lowcomm

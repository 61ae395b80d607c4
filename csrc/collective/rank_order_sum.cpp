#include "collective/rank_order_sum.h"

#include "codec/none.h"

namespace lowcomm {
namespace {

void add(void* sum, const void* x, DType dtype, ReduceKind kind, uint64_t count, bool first) {
  if (first) {
    reduceAssign(sum, x, dtype, count);
  } else {
    reduceInto(sum, x, dtype, kind, count);
  }
}

void addReceived(std::byte* sum, const Run& run, std::span<const std::byte> payload, DType dtype, ReduceKind kind,
                 bool first) {
  float* decoded = reinterpret_cast<float*>(sum);
  if (run.codec->spec().id == CodecId::none) {
    add(sum, NoneCodec::elements(dtype, payload, run.count).data(), dtype, kind, run.count, first);
  } else if (first) {
    run.codec->decode(decoded, DType::float32, payload, run.offset, run.count);
  } else {
    run.codec->decodeAdd(decoded, dtype, payload, run.offset, run.count);
  }
}

}  // namespace

void sumInRankOrder(OpContext& op, Contributions& contributions, const Run& run,
                    const std::vector<std::span<const std::byte>>& payloads, std::byte* out, DType dtype,
                    const Reduction& reduction) {
  const void* own = contributions.own(run);
  // Where the result stands, if it has the type of the sum and is not read when something has been written there.
  const bool direct = accumulatorType(dtype) == dtype && (own != out || op.group.rank() == 0);
  std::byte* sum = direct ? out : scratch(op.group.accumulator, run.count * itemBytes(accumulatorType(dtype)));
  for (int rank = 0; rank < op.group.size(); ++rank) {
    if (rank == op.group.rank()) {
      add(sum, own, dtype, reduction.kind, run.count, rank == 0);
    } else {
      op.attribute(rank, [&] { addReceived(sum, run, payloads[rank], dtype, reduction.kind, rank == 0); });
    }
  }
  reduceFinish(out, sum, dtype, run.count, reduction.average ? op.group.size() : 0);
}

}  // namespace lowcomm

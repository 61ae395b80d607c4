#include "collective/host_summer.h"

#include <string>

#include "base/error.h"
#include "codec/fused.h"
#include "codec/none.h"
#include "collective/context.h"
#include "collective/reduction.h"
#include "kernels/reduce.h"

namespace lowcomm {
namespace {

bool isExact(const Run& run) {
  return run.codec->spec().id == CodecId::none;
}

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
  if (isExact(run)) {
    add(sum, NoneCodec::elements(dtype, payload, run.count).data(), dtype, kind, run.count, first);
  } else if (first) {
    run.codec->decode(decoded, DType::float32, payload, run.offset, run.count);
  } else {
    run.codec->decodeAdd(decoded, dtype, payload, run.offset, run.count);
  }
}

// Of an all_reduce.
void expectReducible(const SumElements& elements) {
  for (size_t rank = 0; rank < elements.entries.size(); ++rank) {
    const auto& segments = elements.slices.of(static_cast<int>(rank)).layout.segments();
    for (size_t s = 0; s < segments.size(); ++s) {
      const bool exact = segments[s].codec.id == CodecId::none;
      if (exact && elements.entries[rank][s].residual) {
        throw ValueError("all_reduce: expected no residual of exact elements, got one");
      }
      if (!exact && elements.reduction.kind != ReduceKind::sum) {
        throw ValueError(std::string("all_reduce of codes: expected a sum, got ") +
                         reduceName(elements.reduction.kind));
      }
    }
  }
}

}  // namespace

HostSummer::HostSummer(OpContext& op, const SumElements& elements)
    : op_(op),
      elements_(elements),
      own_(elements.slices.of(op.rank())),
      average_over_(elements.reduction.average ? op.size() : 0),
      contributions_(op, elements) {
  if (!elements.encoded_again) return;
  expectReducible(elements);
  codes_.emplace(own_);
}

void HostSummer::check(size_t k) {
  if (!codes_) contributions_.checkOwn(k);  // in an all_reduce the encoding of the sum looks at the own elements too
}

void HostSummer::absorb(size_t k, const Payloads& payloads) {
  if (k >= own_.frames.size()) return;  // other slices are longer
  size_t at = 0;
  for (const Run& run : own_.frames[k].runs) {
    Payloads whole(payloads.size());
    for (size_t rank = 0; rank < payloads.size(); ++rank) {
      if (payloads[rank].empty()) continue;
      whole[rank] = slices_.take(run, static_cast<int>(rank), payloads[rank].subspan(at, run.bytes));
    }
    at += run.bytes;
    if (!run.last()) continue;
    if (codes_ && !isExact(run)) {
      encodeSum(run, codes_->of(k, run), whole);
      continue;
    }
    sum(run, whole);
    if (codes_) run.encode(codes_->of(k, run), output(op_.rank(), run), elements_.dtype, {}, "of the sum");
  }
}

std::byte* HostSummer::output(int owner, const Run& run) const {
  return static_cast<std::byte*>(elements_.entries[owner][run.segment].output) +
         run.offset * itemBytes(elements_.dtype);
}

// Exact elements are reduced in their own type (fp16 and bf16 in fp32), codes are decoded into an fp32 sum.
void HostSummer::sum(const Run& run, const Payloads& payloads) {
  const DType dtype = elements_.dtype;
  const ReduceKind kind = elements_.reduction.kind;
  std::byte* out = output(op_.rank(), run);
  const void* own = contributions_.own(run);
  // In the output, if it has the type of the sum and is not read after something has been written there.
  const bool direct = accumulatorType(dtype) == dtype && (own != out || op_.rank() == 0);
  std::byte* sum = direct ? out : scratch(op_.group.accumulator, run.count * itemBytes(accumulatorType(dtype)));
  for (int rank = 0; rank < op_.size(); ++rank) {
    if (rank == op_.rank()) {
      add(sum, own, dtype, kind, run.count, rank == 0);
    } else {
      op_.attribute(rank, [&] { addReceived(sum, run, payloads[rank], dtype, kind, rank == 0); });
    }
  }
  reduceFinish(out, sum, dtype, run.count, average_over_);
}

void HostSummer::encodeSum(const Run& run, std::span<std::byte> codes, const Payloads& payloads) {
  const int own = op_.rank();
  std::vector<Contribution> all(payloads.size());
  for (size_t rank = 0; rank < all.size(); ++rank)
    all[rank].payload = payloads[rank];
  all[own].own = contributions_.own(run);
  all[own].own_type = contributions_.ownType(run);
  try {
    contributions_.fused(run).encodeSum(codes, output(own, run), elements_.dtype, all, average_over_, run.offset,
                                        run.count, contributions_.drawsOf(run, own).again(),
                                        contributions_.residualOf(run, own));
  } catch (const NonFiniteError& error) {
    contributions_.checkOwn(run);  // this rank's elements may be why
    throw run.inMessage(error, "of the sum");
  } catch (const ValueError&) {
    contributions_.checkOwn(run);
    throw;
  } catch (const WireError&) {
    attribute(run, payloads);
    throw;
  }
}

// Throws PeerError for the first rank whose payload does not decode.
void HostSummer::attribute(const Run& run, const Payloads& payloads) const {
  std::vector<float> decoded(run.count);
  for (int rank = 0; rank < op_.size(); ++rank) {
    if (rank == op_.rank()) continue;
    op_.attribute(rank,
                  [&] { run.codec->decode(decoded.data(), DType::float32, payloads[rank], run.offset, run.count); });
  }
}

void HostSummer::takeSums(int owner, size_t k, std::span<const std::byte> payload) {
  op_.attribute(owner, [&] {
    size_t at = 0;
    for (const Run& run : elements_.slices.of(owner).frames[k].runs) {
      const auto whole = sums_.take(run, owner, payload.subspan(at, run.bytes));
      at += run.bytes;
      if (run.last()) run.codec->decode(output(owner, run), elements_.dtype, whole, run.offset, run.count);
    }
  });
}

}  // namespace lowcomm

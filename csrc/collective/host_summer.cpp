#include "collective/host_summer.h"

#include <algorithm>

#include "base/error.h"
#include "codec/coded_residual.h"
#include "codec/float_codec.h"
#include "collective/context.h"
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

// Checks the elements of an all_reduce, or of a reduce, in which slices of other ranks have no output.
void expectReducible(const SumElements& elements) {
  for (size_t rank = 0; rank < elements.entries.size(); ++rank) {
    const auto& segments = elements.slices.of(static_cast<int>(rank)).layout.segments();
    for (size_t s = 0; s < segments.size(); ++s) {
      const bool exact = segments[s].codec.id == CodecId::none;
      const ScatterEntry& entry = elements.entries[rank][s];
      if (exact && entry.feedback()) throw ValueError("all_reduce: expected no residual of exact elements, got one");
      if (elements.sums && !entry.output && (exact || elements.dtype != DType::float32))
        throw ValueError("all_reduce: expected memory for what does not stay in codes of float32 elements, got none");
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
  if (elements.sums) {
    codes_ = &elements.sums->of(op.rank());
  } else if (own_.layout.coded()) {
    codes_ = &own_codes_.emplace(own_);
  }
}

void HostSummer::check(size_t k) {
  // In an all_reduce the encoding of the sum looks at the own elements too.
  if (!elements_.encoded_again) contributions_.checkOwn(k);
}

// Codes as they were made of the sums, exact elements from where the sums are.
void HostSummer::encodeSums(size_t k, std::span<std::byte> payload) {
  if (codes_) return codes_->copy(k, payload);
  size_t at = 0;
  for (const Run& run : own_.frames[k].runs) {
    run.encode(payload.subspan(at, run.bytes), output(op_.rank(), run), elements_.dtype, {}, "of the sum");
    at += run.bytes;
  }
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

// Where a coded run is decoded to: its output, or where it has none memory for it to be looked at.
std::byte* HostSummer::decoded(int owner, const Run& run) {
  if (elements_.entries[owner][run.segment].output) return output(owner, run);
  return scratch(op_.group.accumulator, run.count * sizeof(float));
}

// Exact elements are reduced in their own type (fp16 and bf16 in fp32), codes are decoded into an fp32 sum.
void HostSummer::sum(const Run& run, const Payloads& payloads) {
  const DType dtype = elements_.dtype;
  const ReduceKind kind = elements_.reduction.kind;
  std::byte* out = output(op_.rank(), run);
  const void* own = contributions_.own(run);
  // In the output, if it has the type of the sum and is not read after something has been written there.
  const bool own_first = op_.rank() == 0 || (op_.rank() == 1 && own == out && reduceCommutes(kind) && isExact(run));
  const bool direct = accumulatorType(dtype) == dtype && (own != out || own_first);
  std::byte* sum = direct ? out : scratch(op_.group.accumulator, run.count * itemBytes(accumulatorType(dtype)));
  if (own_first) add(sum, own, dtype, kind, run.count, /*first=*/true);
  for (int rank = 0; rank < op_.size(); ++rank) {
    const bool first = rank == 0 && !own_first;
    if (rank != op_.rank()) {
      op_.attribute(rank, [&] { addReceived(sum, run, payloads[rank], dtype, kind, first); });
    } else if (!own_first) {
      add(sum, own, dtype, kind, run.count, first);
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
  std::byte* out = decoded(own, run);
  try {
    contributions_.fused(run).encodeSum(codes, out, elements_.dtype, all, average_over_, run.offset, run.count,
                                        contributions_.drawsOf(run, own).again(), contributions_.residualOf(run, own));
    contributions_.keep(run, own);
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
  if (elements_.sums) elements_.sums->see(reinterpret_cast<const float*>(out), run.count);
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
  if (elements_.sums) elements_.sums->of(owner).take(k, payload);
  op_.attribute(owner, [&] {
    size_t at = 0;
    for (const Run& run : elements_.slices.of(owner).frames[k].runs) {
      const auto whole = sums_.take(run, owner, payload.subspan(at, run.bytes));
      at += run.bytes;
      if (!run.last()) continue;
      std::byte* out = decoded(owner, run);
      run.codec->decode(out, elements_.dtype, whole, run.offset, run.count);
      if (elements_.sums) elements_.sums->see(reinterpret_cast<const float*>(out), run.count);
    }
  });
}

namespace {

bool anyResidual(const ScatterEntries& entries) {
  return std::any_of(entries.begin(), entries.end(), [](const auto& slice) {
    return std::any_of(slice.begin(), slice.end(), [](const ScatterEntry& entry) { return entry.feedback(); });
  });
}

}  // namespace

std::byte* scratch(std::vector<std::byte>& memory, size_t bytes) {
  if (memory.size() < bytes) memory.resize(bytes);
  return memory.data();
}

Contributions::Contributions(OpContext& op, const SumElements& elements) : op_(op), elements_(elements) {
  const Reduction& reduction = elements.reduction;
  if (reduction.premultiplied && anyResidual(elements.entries)) {
    throw ValueError(op.op + ": error feedback: expected a sum or an average, got premul_sum");
  }
  if (!reduceSupports(elements.dtype, reduction.kind)) {
    throw TypeError(op.op + ": expected a dtype that " + reduceName(reduction.kind) + " takes, got " +
                    dtypeName(elements.dtype));
  }
}

void Contributions::checkOwn(size_t k) {
  const auto& frames = elements_.slices.of(op_.rank()).frames;
  if (k >= frames.size()) return;
  for (const Run& run : frames[k].runs) {
    if (run.part == 0) checkOwn(run);
  }
}

void Contributions::checkOwn(const Run& run) {
  const int own = op_.rank();
  run.codec->expectTaken(contribution(run, own), elements_.dtype, run.at, run.count, sliceFor(own));
}

void Contributions::encode(size_t k, int peer, std::span<std::byte> payload) {
  const std::string of = sliceFor(peer);
  size_t at = 0;
  for (const Run& run : elements_.slices.of(peer).frames[k].runs) {
    const std::span<std::byte> part = payload.subspan(at, run.bytes);
    parts_.write(part, run, peer, [&](std::span<std::byte> whole) { encodeRun(k, run, peer, of, whole); });
    at += run.bytes;
  }
}

void Contributions::encodeRun(size_t k, const Run& run, int peer, const std::string& of, std::span<std::byte> payload) {
  const DType dtype = elements_.dtype;
  const size_t frames = elements_.slices.of(peer).frames.size();
  const Draws draws = drawsOf(run, peer);
  const void* x = contribution(run, peer);
  float* residual = takeResidual(run, peer);
  Loss& loss = op_.counters.loss;
  if (!residual) {
    run.encode(payload, x, dtype, draws, of);
    return sample(loss, k, frames, run, x, dtype, draws);
  }
  const auto window = windowOf(loss, k, frames, run, draws.step);
  if (window) withFeedback(x, residual, *window);
  try {
    fused(run).encodeFeedback(payload, {x, dtype}, {residual, DType::float32}, run.offset, run.count, draws);
  } catch (const NonFiniteError& error) {
    throw run.inMessage(error, of);
  }
  keep(run, peer);
  if (window) addLost(loss, residual, *window);
}

// The elements of a window as they are encoded, which the residual no longer tells afterwards.
void Contributions::withFeedback(const void* x, const float* residual, const Window& window) {
  const DType dtype = elements_.dtype;
  encoded_.resize(window.count);
  reduceAssign(encoded_.data(), static_cast<const std::byte*>(x) + window.first * itemBytes(dtype), dtype,
               window.count);
  reduceInto(encoded_.data(), residual + window.first, DType::float32, ReduceKind::sum, window.count);
}

// The new residual is the elements that were encoded less their codes' values.
void Contributions::addLost(Loss& loss, const float* residual, const Window& window) {
  decoded_.resize(window.count);
  for (uint64_t i = 0; i < window.count; ++i)
    decoded_[i] = encoded_[i] - residual[window.first + i];
  addLoss(loss, encoded_.data(), decoded_.data(), window.count);
}

// This rank's elements of `run` for `peer`, scaled where the reduction says so.
const void* Contributions::contribution(const Run& run, int peer) {
  const size_t item = itemBytes(elements_.dtype);
  const ScatterEntry& of = entry(run, peer);
  if (of.make) {
    auto* made = reinterpret_cast<float*>(scratch(op_.group.scaled, run.count * item));
    (*of.make)(made, of.first + run.offset, run.count);
    return made;
  }
  const void* input = static_cast<const std::byte*>(of.input) + run.offset * item;
  if (!elements_.reduction.premultiplied) return input;
  std::byte* scaled = scratch(op_.group.scaled, run.count * item);
  scale(scaled, input, elements_.dtype, elements_.reduction.premultiply, run.count);
  return scaled;
}

float* Contributions::residualOf(const Run& run, int peer) {
  const ScatterEntry& of = entry(run, peer);
  if (of.coded) {
    if (residual_.size() < run.count) residual_.resize(run.count);
    return residual_.data();
  }
  return of.residual ? of.residual + run.offset : nullptr;
}

// As it was before the op.
float* Contributions::takeResidual(const Run& run, int peer) {
  float* residual = residualOf(run, peer);
  const ScatterEntry& of = entry(run, peer);
  if (of.coded) of.coded->read(of.first + run.offset, run.count, residual);
  return residual;
}

void Contributions::keep(const Run& run, int peer) {
  const ScatterEntry& of = entry(run, peer);
  if (of.coded) of.coded->write(of.first + run.offset, run.count, residual_.data());
}

Draws Contributions::drawsOf(const Run& run, int peer) const {
  return elements_.draws.slot(entry(run, peer).slot);
}

DType Contributions::ownType(const Run& run) const {
  return entry(run, op_.rank()).feedback() ? DType::float32 : elements_.dtype;
}

const void* Contributions::own(const Run& run) {
  const void* x = contribution(run, op_.rank());
  float* residual = takeResidual(run, op_.rank());
  if (!residual) return x;
  own_.resize(run.count);
  reduceAssign(own_.data(), x, elements_.dtype, run.count);
  reduceInto(own_.data(), residual, DType::float32, ReduceKind::sum, run.count);
  std::fill_n(residual, run.count, 0.0f);
  return own_.data();
}

FusedCodec& Contributions::fused(const Run& run) {
  if (!fused_ || &fused_->codec() != run.codec.get()) fused_.emplace(run.codec);
  return *fused_;
}

}  // namespace lowcomm

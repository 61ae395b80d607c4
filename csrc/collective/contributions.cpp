#include "collective/contributions.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "collective/context.h"
#include "collective/reduction.h"
#include "kernels/reduce.h"

namespace lowcomm {
namespace {

bool anyResidual(const ScatterEntries& entries) {
  return std::any_of(entries.begin(), entries.end(), [](const auto& slice) {
    return std::any_of(slice.begin(), slice.end(), [](const ScatterEntry& entry) { return entry.residual; });
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
  float* residual = residualOf(run, peer);
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
  const void* input = static_cast<const std::byte*>(entry(run, peer).input) + run.offset * item;
  if (!elements_.reduction.premultiplied) return input;
  std::byte* scaled = scratch(op_.group.scaled, run.count * item);
  scale(scaled, input, elements_.dtype, elements_.reduction.premultiply, run.count);
  return scaled;
}

float* Contributions::residualOf(const Run& run, int peer) const {
  float* residual = entry(run, peer).residual;
  return residual ? residual + run.offset : nullptr;
}

Draws Contributions::drawsOf(const Run& run, int peer) const {
  return elements_.draws.slot(entry(run, peer).slot);
}

DType Contributions::ownType(const Run& run) const {
  return residualOf(run, op_.rank()) ? DType::float32 : elements_.dtype;
}

const void* Contributions::own(const Run& run) {
  const void* x = contribution(run, op_.rank());
  const size_t bytes = run.count * itemBytes(ownType(run));
  float* residual = residualOf(run, op_.rank());
  if (residual) {
    repaired_.resize(bytes);
    reduceAssign(repaired_.data(), x, elements_.dtype, run.count);
    reduceInto(repaired_.data(), residual, DType::float32, ReduceKind::sum, run.count);
    std::fill_n(residual, run.count, 0.0f);
    x = repaired_.data();
  }
  if (!run.codec->needsRepair(x, ownType(run), run.count)) return x;
  if (!residual) {
    const auto* from = static_cast<const std::byte*>(x);
    repaired_.assign(from, from + bytes);
  }
  run.codec->repair(repaired_.data(), ownType(run), run.count);
  return repaired_.data();
}

FusedCodec& Contributions::fused(const Run& run) {
  if (!fused_ || &fused_->codec() != run.codec.get()) fused_.emplace(run.codec);
  return *fused_;
}

}  // namespace lowcomm

#include "collective/contributions.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace lowcomm {
namespace {

std::string sliceFor(int rank) {
  return "of the slice for rank " + std::to_string(rank);
}

}  // namespace

const char* Reduction::name() const {
  if (average) return "avg";
  return premultiplied ? "premul_sum" : reduceName(kind);
}

KeyValues describeReduction(const std::string& op, const std::vector<MessageSummary>& messages,
                            const Reduction& reduction) {
  KeyValues description = describe(op, messages);
  description.fields.insert(std::prev(description.fields.end()), {"reduce op", reduction.name()});
  return description;
}

std::byte* scratch(std::vector<std::byte>& memory, size_t bytes) {
  if (memory.size() < bytes) memory.resize(bytes);
  return memory.data();
}

Contributions::Contributions(OpContext& op, const RankPlans& slices, DType dtype, std::vector<const void*> inputs,
                             const Reduction& reduction, const Draws& draws, std::vector<float*> residuals,
                             const SegmentPlaces* places)
    : op_(op),
      slices_(slices),
      dtype_(dtype),
      inputs_(std::move(inputs)),
      reduction_(reduction),
      draws_(draws),
      residuals_(std::move(residuals)),
      places_(places) {
  if ((!residuals_.empty() || places) && reduction.premultiplied) {
    throw ValueError(op.op + ": error feedback: expected a sum or an average, got premul_sum");
  }
  if (!reduceSupports(dtype, reduction.kind)) {
    throw TypeError(op.op + ": expected a dtype that " + reduceName(reduction.kind) + " takes, got " +
                    dtypeName(dtype));
  }
}

void Contributions::checkOwn(size_t k) {
  const auto& frames = slices_.of(op_.group.rank()).frames;
  if (k >= frames.size()) return;
  for (const Run& run : frames[k].runs) {
    if (run.part == 0) checkOwn(run);
  }
}

void Contributions::checkOwn(const Run& run) {
  const int own = op_.group.rank();
  run.codec->expectTaken(contribution(run, own), dtype_, run.at, run.count, sliceFor(own));
}

void Contributions::encode(size_t k, int peer, std::span<std::byte> payload) {
  const MessagePlan& slice = slices_.of(peer);
  const std::string of = sliceFor(peer);
  slice.frames[k].eachRun(payload, [&](const Run& run, std::span<std::byte> part) {
    const Draws draws = drawsOf(run, peer);
    outgoing_.write(part, run, peer, [&](std::span<std::byte> whole) {
      const void* x = contribution(run, peer);
      Loss& loss = op_.counters.loss;
      float* residual = residualOf(run, peer);
      if (!residual) {
        run.encode(whole, x, dtype_, draws, of);
        return sample(loss, k, slice.frames.size(), run, x, dtype_, draws);
      }
      const auto window = windowOf(loss, k, slice.frames.size(), run, draws.step);
      if (window) withFeedback(x, residual, *window);
      run.countInMessage(of, [&] {
        fused(run).encodeFeedback(whole, {x, dtype_}, {residual, DType::float32}, run.offset, run.count, draws);
      });
      if (window) addLost(loss, residual, *window);
    });
  });
}

// What is encoded of a window, which the residual afterwards no longer tells.
void Contributions::withFeedback(const void* x, const float* residual, const Window& window) {
  encoded_.resize(window.count);
  reduceAssign(encoded_.data(), static_cast<const std::byte*>(x) + window.first * itemBytes(dtype_), dtype_,
               window.count);
  reduceInto(encoded_.data(), residual + window.first, DType::float32, ReduceKind::sum, window.count);
}

// The new residual is what was encoded less what it decodes to.
void Contributions::addLost(Loss& loss, const float* residual, const Window& window) {
  std::vector<float>& decoded = decoded_;
  decoded.resize(window.count);
  for (uint64_t i = 0; i < window.count; ++i)
    decoded[i] = encoded_[i] - residual[window.first + i];
  addLoss(loss, encoded_.data(), decoded.data(), window.count);
}

// This rank's elements of `run` for `peer`, premultiplied where the reduction says so.
const void* Contributions::contribution(const Run& run, int peer) {
  const size_t item = itemBytes(dtype_);
  const void* input = places_ ? static_cast<const std::byte*>((*places_)[peer][run.segment].data) + run.offset * item
                              : static_cast<const std::byte*>(inputs_[peer]) + run.at * item;
  if (!reduction_.premultiplied) return input;
  std::byte* scaled = scratch(op_.group.scaled, run.count * item);
  scale(scaled, input, dtype_, reduction_.premultiply, run.count);
  return scaled;
}

float* Contributions::residualOf(const Run& run, int peer) const {
  if (places_) {
    float* residual = (*places_)[peer][run.segment].residual;
    return residual ? residual + run.offset : nullptr;
  }
  return residuals_.empty() ? nullptr : residuals_[peer] + run.at;
}

Draws Contributions::drawsOf(const Run& run, int peer) const {
  if (places_) return draws_.slot((*places_)[peer][run.segment].slot);
  const size_t segments = slices_.of(peer).layout.segments().size();
  return draws_.slot(static_cast<uint64_t>(peer) * segments + run.segment);
}

const void* Contributions::own(const Run& run) {
  const void* x = contribution(run, op_.group.rank());
  const size_t bytes = run.count * itemBytes(ownType(run));
  float* residual = residualOf(run, op_.group.rank());
  if (residual) {
    repaired_.resize(bytes);
    reduceAssign(repaired_.data(), x, dtype_, run.count);
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

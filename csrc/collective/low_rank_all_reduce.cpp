// all_reduce of matrices by low-rank factors, W ranks; p and r are the bytes of all encoded factors P and R:
//   1. Every rank forms its P = A·Q of each matrix; an all_reduce sums them, and tensors that are no matrices with
//   them:
//      2(W - 1)/W·p bytes out and in, and those of the other tensors.
//   2. Every rank orthonormalises the sum P in a fixed order: no bytes.
//   3. It forms R = Aᵀ·P; an all_reduce sums them, with a sequence number of its own: 2(W - 1)/W·r bytes out and in.
//   With them, where asked for, a random projection of A − P·Rᵀ, exact: 2(W - 1)/W·16 bytes a matrix.
//   4. It writes P·Rᵀ to the tensors, the loss to the residuals, and R to the factors Q: no bytes.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <deque>
#include <limits>
#include <string>

#include "base/error.h"
#include "base/float_env.h"
#include "collective/all_reduce.h"
#include "collective/op_context.h"
#include "collective/summer.h"
#include "kernels/isa/table.h"
#include "kernels/low_rank/low_rank.h"
#include "kernels/low_rank/signs.h"
#include "kernels/reduce.h"

namespace lowcomm {
namespace {

constexpr uint64_t kPiece = 4096;                     // elements widened at a time
constexpr float kOverflow = 0x1p100f;                 // above it a product of factors might not be finite
constexpr uint64_t kProbeSeed = 0xa0761d6478bd642fu;  // other signs than those of a factor's new vectors

bool isZero(const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  return bytes == 0 || (at[0] == 0 && std::memcmp(at, at + 1, bytes - 1) == 0);
}

// All of them smaller than `limit` in magnitude, so no NaN either.
bool isBelow(const float* x, uint64_t n, float limit) {
  bool below = true;
  for (uint64_t i = 0; i < n; ++i)
    below &= std::fabs(x[i]) < limit;
  return below;
}

bool isFinite(const void* data, DType dtype, uint64_t n) {
  float wide[kPiece];
  for (uint64_t at = 0; at < n; at += kPiece) {
    const uint64_t count = std::min(kPiece, n - at);
    const auto* x = static_cast<const std::byte*>(data) + at * itemBytes(dtype);
    if (dtype == DType::float32) {
      if (!isBelow(reinterpret_cast<const float*>(x), count, std::numeric_limits<float>::infinity())) return false;
      continue;
    }
    reduceAssign(wide, x, dtype, count);
    if (!isBelow(wide, count, std::numeric_limits<float>::infinity())) return false;
  }
  return true;
}

// One tensor in progress.
class TensorCompression {
 public:
  TensorCompression(const LowRankTensor& tensor, DType dtype)
      : t_(tensor), dtype_(dtype), idle_(tensor.residual && isZero(tensor.data, tensor.elements * itemBytes(dtype))) {
    if (t_.rank == 0) return;
    if (t_.rows * t_.columns != t_.elements || t_.rank >= t_.rows || t_.rank >= t_.columns) {
      throw ValueError("compressed all_reduce: expected a rank below both sides of a matrix of " +
                       std::to_string(t_.elements) + " elements, got rank " + std::to_string(t_.rank) + " of " +
                       std::to_string(t_.rows) + " x " + std::to_string(t_.columns));
    }
  }

  const LowRankTensor& tensor() const { return t_; }
  bool lowRank() const { return t_.rank > 0; }
  std::vector<float>& p() { return p_; }
  const std::vector<float>& r() const { return r_; }

  // Into the first message: the elements themselves, or their projection P.
  void share(AllReduceMessage& message, const LowRankKernels& kernels) {
    if (t_.kept && (idle_ || !lowRank())) std::memcpy(t_.residual, t_.kept, t_.elements * sizeof(float));
    if (!lowRank()) {
      if (idle_) lost_.assign(t_.elements, 0);
      float* residual = idle_ ? lost_.data() : t_.residual;
      message.tensors.push_back({t_.elements, t_.data, residual, t_.slot, t_.first_owner});
      return;
    }
    p_.assign(t_.rank * t_.rows, 0);
    if (!idle_) {
      widen();
      project(kernels);
    }
    message.tensors.push_back({p_.size(), p_.data(), nullptr, t_.slot, t_.first_owner});
  }

  // Into the second: R, with what its coding will lose. The first has taken a slot for each of `ranks`.
  void shareBack(AllReduceMessage& message, const LowRankKernels& kernels, int ranks) {
    orthonormalise(p_.data(), t_.rank, t_.rows);
    r_.assign(t_.rank * t_.columns, 0);
    if (!idle_) kernels.back_project(r_.data(), a_, p_.data(), t_.rows, t_.columns, t_.rank);
    if (t_.residual) {
      own_ = r_;
      lost_.assign(r_.size(), 0);
    }
    float* residual = t_.residual ? lost_.data() : nullptr;
    message.tensors.push_back({r_.size(), r_.data(), residual, t_.slot + static_cast<uint64_t>(ranks), t_.first_owner});
  }

  // With them, where the caller asks for it: this rank's part of the estimate of what P·Rᵀ leaves out.
  void probe(std::vector<float>& probes) {
    if (!t_.rest) return;
    probe_at_ = probes.size();
    probes.resize(probe_at_ + kProbes);
    if (idle_) return;
    probeRest(probes.data() + probe_at_, sums_.data(), omega(), p_.data(), r_.data(), t_.rows, t_.columns, t_.rank,
              probeSeed());
  }

  void takeProbe(const std::vector<float>& probes) const {
    if (!t_.rest) return;
    *t_.rest = 0;
    for (size_t k = 0; k < kProbes; ++k)
      *t_.rest += double{probes[probe_at_ + k]} * probes[probe_at_ + k];
  }

  // The second has come. `times`: how often the result stands for what was sent, the group's size for an average.
  void finish(const LowRankKernels& kernels, bool rounds_here, float times) {
    if (!lowRank()) {
      for (uint64_t i = 0; i < lost_.size(); ++i)  // of an idle tensor
        t_.residual[i] += lost_[i];
      return;
    }
    if (t_.residual) {
      for (size_t i = 0; i < own_.size(); ++i)
        own_[i] -= lost_[i];
      // Of an idle tensor the residual is what it was; of others A stands there.
      kernels.subtract(t_.residual, t_.residual, p_.data(), own_.data(), t_.rows, t_.columns, t_.rank);
    }
    write(kernels, rounds_here, times);
    if (t_.energies) squaredSingularValues(t_.energies, r_.data(), t_.rank, t_.columns);
    if (isZero(r_.data(), r_.size() * sizeof(float))) return;  // nobody took part: the directions stay
    std::memcpy(t_.factor, r_.data(), r_.size() * sizeof(float));
    orthonormaliseWhole(t_.factor, t_.rank, t_.columns, t_.seed);
  }

  void spoil() {
    if (!lowRank()) return;
    const std::vector<float> nan(std::min(kPiece, t_.elements), std::numeric_limits<float>::quiet_NaN());
    for (uint64_t at = 0; at < t_.elements; at += kPiece)
      reduceFinish(element(at), nan.data(), dtype_, std::min(kPiece, t_.elements - at), 0);
  }

 private:
  std::byte* element(uint64_t at) const { return static_cast<std::byte*>(t_.data) + at * itemBytes(dtype_); }

  // A, in the residual's place where there is one.
  void widen() {
    if (!t_.residual && dtype_ == DType::float32) {
      a_ = static_cast<const float*>(t_.data);
      return;
    }
    if (t_.residual) {
      for (uint64_t at = 0; at < t_.elements; at += kPiece) {  // one pass over memory
        const uint64_t count = std::min(kPiece, t_.elements - at);
        if (t_.kept) std::memcpy(t_.residual + at, t_.kept + at, count * sizeof(float));
        reduceInto(t_.residual + at, element(at), dtype_, ReduceKind::sum, count);
      }
      a_ = t_.residual;
      return;
    }
    wide_.resize(t_.elements);
    reduceAssign(wide_.data(), t_.data, dtype_, t_.elements);
    a_ = wide_.data();
  }

  uint64_t probeSeed() const { return t_.seed ^ kProbeSeed; }
  const float* omega() const { return directions_.data() + t_.rank * t_.columns; }

  // P, and with a probe its sums too, as of one direction more: one pass over A.
  void project(const LowRankKernels& kernels) {
    if (!t_.rest) {
      kernels.project(p_.data(), a_, t_.factor, t_.rows, t_.columns, t_.rank);
      return;
    }
    directions_.assign(t_.factor, t_.factor + t_.rank * t_.columns);
    directions_.resize((t_.rank + 1) * t_.columns);
    drawSigns(directions_.data() + t_.rank * t_.columns, t_.columns, probeSeed());
    p_.resize((t_.rank + 1) * t_.rows);
    kernels.project(p_.data(), a_, directions_.data(), t_.rows, t_.columns, t_.rank + 1);
    sums_.assign(p_.end() - static_cast<std::ptrdiff_t>(t_.rows), p_.end());
    p_.resize(t_.rank * t_.rows);
  }

  // P·Rᵀ to the tensor. What its rounding to a 16-bit type loses is fed back by one rank.
  void write(const LowRankKernels& kernels, bool rounds_here, float times) {
    if (dtype_ == DType::float32) {
      kernels.expand(static_cast<float*>(t_.data), p_.data(), r_.data(), t_.rows, t_.columns, t_.rank);
      return;
    }
    wide_.resize(t_.elements);
    kernels.expand(wide_.data(), p_.data(), r_.data(), t_.rows, t_.columns, t_.rank);
    reduceFinish(t_.data, wide_.data(), dtype_, t_.elements, 0);
    if (!t_.residual || !rounds_here) return;
    float rounded[kPiece];
    for (uint64_t at = 0; at < t_.elements; at += kPiece) {
      const uint64_t count = std::min(kPiece, t_.elements - at);
      reduceAssign(rounded, element(at), dtype_, count);
      for (uint64_t i = 0; i < count; ++i) {
        const float left = (wide_[at + i] - rounded[i]) * times;
        t_.residual[at + i] += std::isfinite(left) ? left : 0;
      }
    }
  }

  const LowRankTensor& t_;
  const DType dtype_;
  const bool idle_;
  const float* a_ = nullptr;
  size_t probe_at_ = 0;
  std::vector<float> wide_, p_, r_, own_, lost_;
  std::vector<float> directions_, sums_;  // of the probe: the factor and ω; A·ω
};

bool holdsElements(const AllReduceMessage& message) {
  return std::any_of(message.tensors.begin(), message.tensors.end(),
                     [](const ReduceTensor& t) { return t.elements > 0; });
}

// What the tensors take uncoded: each element goes to a rank once, and once from there to all.
uint64_t rawBytes(const LowRankMessage& message, int ranks) {
  uint64_t elements = 0;
  for (const LowRankTensor& tensor : message.tensors)
    elements += tensor.elements;
  return 2 * (ranks - 1) * elements * itemBytes(message.dtype) / ranks;
}

}  // namespace

bool lowRankAllReduce(OpContext& op, const LowRankMessage& message, const Reduction& reduction) {
  if (reduction.premultiplied) {
    throw ValueError(op.op + ", compressed: expected a sum or an average, got premul_sum");
  }
  const LowRankKernels& kernels = *lowcomm::kernels().low_rank;
  const int ranks = op.size();
  std::deque<TensorCompression> tensors;
  for (const LowRankTensor& tensor : message.tensors)
    tensors.emplace_back(tensor, message.dtype);

  // A message has one type and one codec: where P's are others than the tensors' next to it, it is a message of its
  // own.
  AllReduceMessage elements(message.codec, message.dtype, message.draws);
  AllReduceMessage projections(message.projection, DType::float32, message.draws);
  AllReduceMessage backs(message.codec, DType::float32, message.draws);
  const bool apart = message.dtype != DType::float32 || message.projection != message.codec;
  {
    Stopwatch watch(op, Doing::encode);
    FloatEnv env;
    for (TensorCompression& tensor : tensors)
      tensor.share(apart && tensor.lowRank() ? projections : elements, kernels);
  }
  std::vector<AllReduceMessage> messages;
  if (holdsElements(elements)) messages.push_back(std::move(elements));
  if (holdsElements(projections)) messages.push_back(std::move(projections));
  allReduce(op, messages, reduction);

  bool finite = true, low_rank = false;
  for (TensorCompression& tensor : tensors) {
    const LowRankTensor& t = tensor.tensor();
    low_rank |= tensor.lowRank();
    finite = finite && (tensor.lowRank() ? isBelow(tensor.p().data(), tensor.p().size(), kOverflow)
                                         : isFinite(t.data, message.dtype, t.elements));
  }
  if (finite && low_rank) {
    ++op.sequence;
    std::vector<float> probes;
    {
      Stopwatch watch(op, Doing::encode);
      FloatEnv env;
      for (TensorCompression& tensor : tensors) {
        if (!tensor.lowRank()) continue;
        tensor.shareBack(backs, kernels, ranks);
        tensor.probe(probes);
      }
    }
    messages = {std::move(backs)};
    if (!probes.empty()) messages.emplace_back(probes.size(), CodecSpec{}, DType::float32, probes.data());
    allReduce(op, messages, reduction);
    for (const TensorCompression& tensor : tensors) {
      if (tensor.lowRank()) tensor.takeProbe(probes);
    }
    for (const TensorCompression& tensor : tensors)
      finite = finite && isBelow(tensor.r().data(), tensor.r().size(), kOverflow);
  }
  Stopwatch watch(op, Doing::decode);
  FloatEnv env;
  for (TensorCompression& tensor : tensors) {
    const auto rounder = static_cast<int>(tensor.tensor().first_owner % static_cast<uint32_t>(ranks));
    if (finite) {
      tensor.finish(kernels, rounder == op.rank(), reduction.average ? static_cast<float>(ranks) : 1.0f);
    } else {
      tensor.spoil();
    }
  }
  op.counters.raw_bytes = rawBytes(message, ranks);
  return finite;
}

}  // namespace lowcomm

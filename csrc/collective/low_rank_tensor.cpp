// The steps of one tensor; low_rank_all_reduce.cpp has their order.
#include "collective/low_rank_tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"
#include "codec/coded_residual.h"
#include "kernels/finite.h"
#include "kernels/reduce.h"

namespace lowcomm {
namespace {

constexpr uint64_t kPiece = 4096;      // elements widened at a time
constexpr float kOverflow = 0x1p100f;  // above it a product of factors might not be finite

bool isZero(const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  return bytes == 0 || (at[0] == 0 && std::memcmp(at, at + 1, bytes - 1) == 0);
}

// All of them smaller than `limit` in magnitude, so no NaN either.
bool isBelow(const float* x, uint64_t n, float limit) {
  return firstNonFinite(x, DType::float32, n, limit) < 0;
}

}  // namespace

TensorCompression::TensorCompression(const LowRankTensor& tensor, DType dtype, std::vector<float>& whole)
    : t_(tensor), dtype_(dtype), whole_(whole), idle_(feedback() && isIdle()) {
  if (t_.rank == 0) return;
  if (t_.rows * t_.columns != t_.elements || t_.rank >= t_.rows || t_.rank >= t_.columns) {
    throw ValueError("compressed all_reduce: expected a rank below both sides of a matrix of " +
                     std::to_string(t_.elements) + " elements, got rank " + std::to_string(t_.rank) + " of " +
                     std::to_string(t_.rows) + " x " + std::to_string(t_.columns));
  }
}

void TensorCompression::share(AllReduceMessage& message, const LowRankKernels& kernels) {
  number_ = static_cast<uint32_t>(message.tensors.size());
  if (t_.kept && (idle_ || !lowRank())) std::memcpy(t_.residual, t_.kept, t_.elements * sizeof(float));
  if (!lowRank()) {
    Elsewhere elsewhere = t_.elsewhere;
    if (idle_) {
      lost_.assign(t_.elements, 0);
      elsewhere.coded = nullptr;
    }
    float* residual = idle_ ? lost_.data() : t_.residual;
    message.tensors.push_back({t_.elements, t_.data, residual, t_.slot, t_.first_owner, elsewhere});
    return;
  }
  p_.assign(t_.rank * t_.rows, 0);
  if (!idle_) {
    widen();
    kernels.project(p_.data(), matrix(), t_.factor, t_.rows, t_.columns, t_.rank);
  }
  message.tensors.push_back({p_.size(), p_.data(), nullptr, t_.slot, t_.first_owner});
}

void TensorCompression::shareBack(AllReduceMessage& message, const LowRankKernels& kernels, int ranks) {
  orthonormalise(p_.data(), t_.rank, t_.rows);
  r_.assign(t_.rank * t_.columns, 0);
  if (!idle_) kernels.back_project(r_.data(), matrix(), p_.data(), t_.rows, t_.columns, t_.rank);
  if (feedback()) {
    own_ = r_;
    lost_.assign(r_.size(), 0);
  }
  float* residual = feedback() ? lost_.data() : nullptr;
  message.tensors.push_back({r_.size(), r_.data(), residual, t_.slot + static_cast<uint64_t>(ranks), t_.first_owner});
}

void TensorCompression::finish(const LowRankKernels& kernels, bool rounds_here, float times) {
  if (!lowRank()) {
    if (!lost_.empty()) finishIdle();
    return;
  }
  float* left = t_.residual;
  if (feedback()) {
    for (size_t i = 0; i < own_.size(); ++i)
      own_[i] -= lost_[i];
    // An idle tensor keeps its residual; otherwise A is stored in its place.
    if (coded()) {
      matrix();
      left = whole_.data();
    }
    if (t_.elsewhere.in_residual) {
      kernels.expand(t_.residual, p_.data(), r_.data(), t_.rows, t_.columns, t_.rank);
    } else {
      kernels.subtract(left, left, p_.data(), own_.data(), t_.rows, t_.columns, t_.rank);
    }
  }
  if (t_.data) write(kernels, rounds_here ? left : nullptr, times);
  if (coded()) coded()->write(0, t_.elements, left);
  if (t_.energies) squaredSingularValues(t_.energies, r_.data(), t_.rank, t_.columns);
  if (isZero(r_.data(), r_.size() * sizeof(float))) return;  // nobody took part: the directions stay
  std::memcpy(t_.factor, r_.data(), r_.size() * sizeof(float));
  orthonormaliseWhole(t_.factor, t_.rank, t_.columns, t_.seed);
}

void TensorCompression::spoil() {
  if (!lowRank() || !t_.data) return;
  const std::vector<float> nan(std::min(kPiece, t_.elements), std::numeric_limits<float>::quiet_NaN());
  for (uint64_t at = 0; at < t_.elements; at += kPiece)
    reduceFinish(element(at), nan.data(), dtype_, std::min(kPiece, t_.elements - at), 0);
}

CodedAverage::Tensor TensorCompression::reduced() {
  const bool there = lowRank() && t_.elsewhere.in_residual;
  return {number_,
          t_.rows,
          t_.columns,
          t_.rank,
          std::move(p_),
          std::move(there ? own_ : r_),
          there ? t_.residual : nullptr,
          there && idle_};
}

// The elements [at, at + count), where they stand or in `memory`; not of a 16-bit type's.
const float* TensorCompression::elements(uint64_t at, uint64_t count, float* memory) const {
  if (t_.elsewhere.from) return t_.elsewhere.from + at;
  if (!t_.elsewhere.make) return reinterpret_cast<const float*>(element(at));
  (*t_.elsewhere.make)(memory, at, count);
  return memory;
}

bool TensorCompression::isIdle() const {
  if (!t_.elsewhere.make) {
    const void* all = t_.elsewhere.from ? static_cast<const void*>(t_.elsewhere.from) : t_.data;
    return isZero(all, t_.elements * itemBytes(dtype_));
  }
  float made[kPiece];
  for (uint64_t at = 0; at < t_.elements; at += kPiece) {
    const uint64_t count = std::min(kPiece, t_.elements - at);
    if (!isZero(elements(at, count, made), count * sizeof(float))) return false;
  }
  return true;
}

// Finishes an idle tensor without a rank: the residual becomes what coding the sums here has lost.
void TensorCompression::finishIdle() {
  float* residual = t_.residual;
  if (coded()) {
    whole_.resize(std::max<size_t>(whole_.size(), t_.elements));
    residual = whole_.data();
    coded()->read(0, t_.elements, residual);
  }
  for (uint64_t i = 0; i < lost_.size(); ++i)
    residual[i] += lost_[i];
  if (coded()) coded()->write(0, t_.elements, residual);
}

// A, where it stands or is put for good: in the residual's place where that is fp32. Else matrix() makes it.
void TensorCompression::widen() {
  const bool made = t_.elsewhere.make || coded();
  if (!feedback() && dtype_ == DType::float32 && !made) {
    a_ = elements(0, t_.elements, nullptr);
    return;
  }
  if (t_.residual) {
    float memory[kPiece];
    for (uint64_t at = 0; at < t_.elements; at += kPiece) {  // one pass over memory
      const uint64_t count = std::min(kPiece, t_.elements - at);
      if (t_.kept) std::memcpy(t_.residual + at, t_.kept + at, count * sizeof(float));
      addElements(t_.residual, at, count, memory);
    }
    a_ = t_.residual;
    return;
  }
  if (made) return;
  wide_.resize(t_.elements);
  reduceAssign(wide_.data(), t_.data, dtype_, t_.elements);
  a_ = wide_.data();
}

// sum[at…] += the elements there.
void TensorCompression::addElements(float* sum, uint64_t at, uint64_t count, float* memory) const {
  const bool elsewhere = t_.elsewhere.make || t_.elsewhere.from;
  const void* x = elsewhere ? static_cast<const void*>(elements(at, count, memory)) : element(at);
  reduceInto(sum + at, x, dtype_, ReduceKind::sum, count);
}

// A; of an idle tensor, which contributes nothing, the residual. Made anew each time where it is nowhere kept: valid
// until another tensor's.
const float* TensorCompression::matrix() {
  if (a_) return a_;
  whole_.resize(std::max<size_t>(whole_.size(), t_.elements));
  float memory[kPiece];
  for (uint64_t at = 0; at < t_.elements; at += kPiece) {
    const uint64_t count = std::min(kPiece, t_.elements - at);
    if (coded()) {
      coded()->read(at, count, whole_.data() + at);
      if (!idle_) addElements(whole_.data(), at, count, memory);
    } else {
      (*t_.elsewhere.make)(whole_.data() + at, at, count);
    }
  }
  return whole_.data();
}

// P·Rᵀ to the tensor. What its rounding to a 16-bit type loses goes to `residual`, of one rank alone.
void TensorCompression::write(const LowRankKernels& kernels, float* residual, float times) {
  if (dtype_ == DType::float32) {
    kernels.expand(static_cast<float*>(t_.data), p_.data(), r_.data(), t_.rows, t_.columns, t_.rank);
    return;
  }
  wide_.resize(t_.elements);
  kernels.expand(wide_.data(), p_.data(), r_.data(), t_.rows, t_.columns, t_.rank);
  reduceFinish(t_.data, wide_.data(), dtype_, t_.elements, 0);
  if (!residual) return;
  float rounded[kPiece];
  for (uint64_t at = 0; at < t_.elements; at += kPiece) {
    const uint64_t count = std::min(kPiece, t_.elements - at);
    reduceAssign(rounded, element(at), dtype_, count);
    for (uint64_t i = 0; i < count; ++i) {
      const float left = (wide_[at + i] - rounded[i]) * times;
      residual[at + i] += std::isfinite(left) ? left : 0;
    }
  }
}

bool TensorCompression::firstIsFinite() const {
  if (lowRank()) return isBelow(p_.data(), p_.size(), kOverflow);
  return !t_.data || firstNonFinite(t_.data, dtype_, t_.elements, std::numeric_limits<float>::infinity()) < 0;
}

bool TensorCompression::secondIsFinite() const {
  return isBelow(r_.data(), r_.size(), kOverflow);
}

}  // namespace lowcomm

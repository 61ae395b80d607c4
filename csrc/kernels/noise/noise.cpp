#include "kernels/noise/noise.h"

#include <algorithm>
#include <cstring>

#include "base/float_env.h"
#include "kernels/noise/noise_rules.h"

namespace lowcomm {

// ---- the reference of the loops, to be read next to FORMAT.md "Perturbations" ----

namespace {

void gaussianBlock(float* z, uint64_t block, const PhiloxKey& key) {
  for (uint64_t lane = 0; lane < kNoiseLanes; ++lane) {
    float rows[4];
    gaussianRows(rows, philox(block * kNoiseLanes + lane, key));
    for (uint64_t row = 0; row < 4; ++row)
      z[row * kNoiseLanes + lane] = rows[row];
  }
}

void rademacherBlock(float* z, uint64_t block, const PhiloxKey& key) {
  for (uint64_t lane = 0; lane < kNoiseLanes; ++lane) {
    const PhiloxWords words = philox(block * kNoiseLanes + lane, key);
    for (uint32_t row = 0; row < 128; ++row)
      z[row * kNoiseLanes + lane] = rademacherRow(words, row);
  }
}

template <uint64_t kBlock, auto kMakeBlock>
void addTerms(float* out, const float* x, uint64_t first, size_t count, const NoiseTerm* terms, size_t term_count) {
  float z[kBlock], group[kBlock], sum[kBlock];
  for (size_t at = 0; at < count;) {
    const uint64_t block = (first + at) / kBlock, from = (first + at) % kBlock;
    for (size_t term = 0; term < term_count; ++term) {
      kMakeBlock(z, block, terms[term].key);
      const bool starts = term % kNoiseGroup == 0, ends = term % kNoiseGroup == kNoiseGroup - 1;
      for (uint64_t i = 0; i < kBlock; ++i) {
        const float value = terms[term].factor * z[i];
        group[i] = starts ? value : group[i] + value;
        if (ends || term == term_count - 1) sum[i] = term < kNoiseGroup ? group[i] : sum[i] + group[i];
      }
    }
    const size_t n = std::min<size_t>(kBlock - from, count - at);
    for (size_t i = 0; i < n; ++i)
      out[at + i] = x ? x[at + i] + sum[from + i] : sum[from + i];
    at += n;
  }
}

}  // namespace

namespace scalar {
constexpr NoiseKernels kNoise = {addTerms<kGaussianBlock, gaussianBlock>, addTerms<kRademacherBlock, rademacherBlock>};
}  // namespace scalar

// ---- sums of perturbations for elements of any type ----

namespace {

// 16-bit elements are widened this many at a time, and stay in the first-level cache until they are narrowed again.
constexpr uint64_t kPiece = 2048;

// The output of a splitmix64 generator (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators; OOPSLA
// 2014) whose state is z.
uint64_t splitmix64(uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

}  // namespace

uint64_t noiseSeed(uint64_t run_seed, uint64_t machine, uint64_t iteration, uint64_t sample) {
  uint64_t seed = 0;
  for (uint64_t number : {run_seed, machine, iteration, sample})
    seed = splitmix64(seed ^ number);
  return seed;
}

void addNoise(const KernelTable& form, Noise noise, void* out, const void* x, DType dtype, uint64_t first,
              uint64_t count, std::span<const NoiseTerm> terms) {
  if (count == 0) return;
  if (terms.empty()) {
    const size_t bytes = count * itemBytes(dtype);
    if (!x) {
      std::memset(out, 0, bytes);
    } else if (x != out) {
      std::memcpy(out, x, bytes);
    }
    return;
  }
  const NoiseKernels::Add add = noise == Noise::gaussian ? form.noise->gaussian : form.noise->rademacher;
  FloatEnv env;
  if (dtype == DType::float32) {
    add(static_cast<float*>(out), static_cast<const float*>(x), first, count, terms.data(), terms.size());
    return;
  }
  const auto widen = dtype == DType::float16 ? form.float16_to_float : form.bfloat16_to_float;
  const auto narrow = dtype == DType::float16 ? form.float_to_float16 : form.float_to_bfloat16;
  float wide[kPiece];
  for (uint64_t at = 0; at < count;) {
    // To the end of a piece of the tensor: whole ones are the fast ones.
    const uint64_t n = std::min(kPiece - (first + at) % kPiece, count - at);
    widen(wide, static_cast<const uint16_t*>(x) + at, n);
    add(wide, wide, first + at, n, terms.data(), terms.size());
    narrow(static_cast<uint16_t*>(out) + at, wide, n);
    at += n;
  }
}

}  // namespace lowcomm

// The reference of the perturbations, to be read beside FORMAT.md "Perturbations"; a machine without a vector form runs
// it.
#include <algorithm>

#include "kernels/noise/noise.h"
#include "kernels/noise/noise_rules.h"

namespace lowcomm {
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

}  // namespace lowcomm

#include "pipeline/subspace.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/float_env.h"
#include "kernels/isa/table.h"
#include "kernels/low_rank/low_rank.h"

namespace lowcomm {
namespace {

// Keeps these numbers apart from the perturbations that the same seed makes (FORMAT.md, "Subspaces").
constexpr uint64_t kSubspace = 0x7375627370616365ull;
enum Part : uint64_t { kBasisPart, kTokenPart };

}  // namespace

NoiseTerm tokenTerm(const TokenSigns& numbers, uint64_t token, float factor) {
  const uint64_t seed = noiseSeed(kSubspace, numbers.seed, kTokenPart, 0);
  return {{seed, static_cast<uint32_t>(token), 0}, factor * numbers.scale};
}

void drawBasis(double* rows, size_t rank, size_t width, uint64_t seed) {
  if (rank == 0 || rank > width) {
    throw ValueError("subspace: rank: expected 1..." + std::to_string(width) + ", the width, got " +
                     std::to_string(rank));
  }
  const size_t count = rank * width;
  std::vector<float> numbers(count);
  const NoiseTerm term{{noiseSeed(kSubspace, seed, kBasisPart, 0), 0, 0}, 1.0f};
  addNoise(kernels(), Noise::gaussian, numbers.data(), nullptr, DType::float32, 0, count, {&term, 1});
  std::copy(numbers.begin(), numbers.end(), rows);
  FloatEnv env;
  if (orthonormalise(rows, rank, width) > 0) {
    throw ValueError("subspace: basis: expected a seed whose rows do not depend on each other, got " +
                     std::to_string(seed) + "; take another");
  }
}

void addTokenSigns(float* out, const float* x, uint64_t token, const TokenSigns& signs, float factor) {
  const NoiseTerm term = tokenTerm(signs, token, factor);
  addNoise(kernels(), Noise::rademacher, out, x, DType::float32, 0, signs.width, {&term, 1});
}

void addTokenNormals(float* out, const float* x, uint64_t token, const TokenSigns& numbers, float factor) {
  const NoiseTerm term = tokenTerm(numbers, token, factor);
  addNoise(kernels(), Noise::gaussian, out, x, DType::float32, 0, numbers.width, {&term, 1});
}

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/noise/noise.h"

namespace lowcomm {

// The numbers of a subspace-constrained pipeline (Protocol Models, arXiv 2506.01260, section 4) that every stage makes
// for itself and none sends. They have the same bits on every machine. FORMAT.md, "Subspaces".

// The basis U of the subspace, as `rank` orthonormal rows of `width` numbers each (Uᵀ, row-major): Gaussian numbers of
// `seed`, orthonormalised by the library's own Gram-Schmidt in fp64. Throws ValueError for a rank that is 0 or above
// `width`.
void drawBasis(double* rows, size_t rank, size_t width, uint64_t seed);

// The fixed part of a token embedding (section 4.3.1 of the paper: T_fixed) as signs: element e of a token's row is
// +scale or -scale, made of (seed, token, e) where it is used. There is no table.
struct TokenSigns {
  uint64_t seed = 0;
  float scale = 1;
  size_t width = 0;
};

inline constexpr uint64_t kMostTokens = uint64_t{1} << 31;

// out = x + factor·(the token's row), or factor·(the row) where x is null; `width` elements, out may be x. `token` is
// below kMostTokens.
void addTokenSigns(float* out, const float* x, uint64_t token, const TokenSigns& signs, float factor);

// addTokenSigns() with the Gaussian numbers of the paper's table: N(0, scale²).
void addTokenNormals(float* out, const float* x, uint64_t token, const TokenSigns& numbers, float factor);

// A token's row as a perturbation: factor·scale times the numbers of its key, whose stream is the token.
NoiseTerm tokenTerm(const TokenSigns& numbers, uint64_t token, float factor);

}  // namespace lowcomm

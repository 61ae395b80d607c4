#pragma once

#include <ATen/ATen.h>

#include <optional>

#include "pipeline/subspace.h"

namespace lowcomm {

// The boundary of a subspace-constrained pipeline (Protocol Models, arXiv 2506.01260, section 4.3, Eq. 8): what stages
// that know a token's id and position take out of its activation before it travels, and add again behind the link.
//
// Activations are [..., width], tokens int64 [...], coefficients [..., rank]. `rows` is Uᵀ, [rank, width], fp32, or
// fp64 for models of fp64: its type is that of the arithmetic and of the coefficients. Dense tensors on one device.

// The frozen part of a token's activation: a row for each token, signs or normal numbers, and one for each position.
struct SubspaceAnchor {
  TokenSigns tokens;
  bool normal = false;                  // N(0, scale²), the paper's, in place of signs
  std::optional<at::Tensor> positions;  // [time, width] of rows' type, added to the last time rows of each sequence
};

// C = (X − positions − T_fixed[tokens])·U. Reads `x` once and holds a few rows of the difference at a time. Throws
// ValueError for shapes that do not fit and, on the host, for a token outside 0...vocabulary − 1.
at::Tensor subspaceEncode(const at::Tensor& x, const at::Tensor& tokens, const at::Tensor& rows,
                          const SubspaceAnchor& anchor, int64_t vocabulary);

// X = C·Uᵀ + positions + T_fixed[tokens], in `type`. Throws as subspaceEncode.
at::Tensor subspaceDecode(const at::Tensor& coefficients, const at::Tensor& tokens, const at::Tensor& rows,
                          const SubspaceAnchor& anchor, int64_t vocabulary, at::ScalarType type);

// positions + T_fixed[tokens] of these tokens, [..., width] in `type`, fp32 or fp64: what a first stage adds to its
// trained embedding.
at::Tensor subspaceAnchor(const at::Tensor& tokens, const SubspaceAnchor& anchor, int64_t vocabulary,
                          at::ScalarType type);

}  // namespace lowcomm

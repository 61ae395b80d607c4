#pragma once

#include <cstddef>

namespace lowcomm {

// Squares of the singular values of P·Rᵀ, descending, for a P with orthonormal columns: the eigenvalues of R·Rᵀ, where
// r is [rank, columns], row-major. The Gram matrix in fp64 by ascending column, Householder reflections to a
// tridiagonal one, and implicit QR steps: every operation in a fixed order, so equal input gives equal bits on every
// CPU. Rounding may leave a value that should be 0 below it: those are 0. Finite input; rank at least 1. Allocates
// rank² doubles; rank²·(columns + 4/3·rank) operations; called under FloatEnv.
void squaredSingularValues(double* out, const float* r, size_t rank, size_t columns);

// The effective rank of a matrix with these squared singular values: the least r with Σ_{i≤r} σ² >= `energy`·Σ σ²;
// 0 where all are 0 (DiLoCoX, arXiv 2506.21263, section 2.4.3).
size_t effectiveRank(const double* squares, size_t count, double energy);

}  // namespace lowcomm

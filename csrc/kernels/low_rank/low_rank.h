#pragma once

#include <cstddef>
#include <cstdint>

namespace lowcomm {

// Products of a matrix with few columns, for compression by low rank (Vogels, Karimireddy, Jaggi: PowerSGD; NeurIPS
// 2019). All ranks must come to the same bits whatever CPU each has, so the order of every sum is fixed here, and no
// multiplication is fused with an addition.
//
// `a` is [rows, columns], row-major. Factors hold one column of theirs after another: p is [rank, rows], r and q are
// [rank, columns]. float32; nothing overlaps unless said. Every form gives the same bits; none allocates or throws;
// called under FloatEnv.
struct LowRankKernels {
  // p = (A·Qᵀ)ᵀ, the projection of each row. Element (i, k): products a[i, j]·q[k, j] are added, by ascending j, to 16
  // partial sums that start from +0, the sum of product j in number j mod 16; then s[l] += s[l + h] for l < h, with
  // h = 8, 4, 2, 1; p is s[0].
  void (*project)(float* p, const float* a, const float* q, size_t rows, size_t columns, size_t rank);

  // r = (Aᵀ·Pᵀ)ᵀ. Element (k, j): from +0 on, a[i, j]·p[k, i] is added by ascending i.
  void (*back_project)(float* r, const float* a, const float* p, size_t rows, size_t columns, size_t rank);

  // out = P·Rᵀ, of which element (i, j) is, from +0 on, the sum of p[k, i]·r[k, j] by ascending k.
  void (*expand)(float* out, const float* p, const float* r, size_t rows, size_t columns, size_t rank);

  // out = A − P·Rᵀ, P·Rᵀ as expand makes it. out may be a.
  void (*subtract)(float* out, const float* a, const float* p, const float* r, size_t rows, size_t columns,
                   size_t rank);
};

// A column that keeps less than this share of its length when the earlier ones are taken out of it depends on them.
inline constexpr double kDependent = 1e-6;

// Orthonormalises `count` vectors of `length` elements, one after another in memory, in place: modified Gram-Schmidt in
// fp64, by ascending number, each rounded to fp32 once at its end. The order of every sum is fixed (8 partial sums,
// element i in number i mod 8, then s[l] += s[l + h] for h = 4, 2, 1), so equal input gives equal bits on every CPU. A
// vector that is zero or depends on those before it (kDependent) becomes zero: a direction that adds nothing. Finite
// input. Returns how many did. Allocates count·length doubles; called under FloatEnv.
size_t orthonormalise(float* x, size_t count, size_t length);

// orthonormalise() without the rounding to fp32; allocates nothing.
size_t orthonormalise(double* x, size_t count, size_t length);

// The same, for a basis that must stay whole: a vector that would become zero is drawn anew first, from ±1 by `seed`
// and its number, and stays zero only when that depends on the others too.
size_t orthonormaliseWhole(float* x, size_t count, size_t length, uint64_t seed);

// Squares of the singular values of P·Rᵀ, descending, for a P with orthonormal columns: the eigenvalues of R·Rᵀ, where
// r is [rank, columns], row-major. The Gram matrix in fp64 by ascending column, Householder reflections to a
// tridiagonal one, and implicit QR steps: every operation in a fixed order, so equal input gives equal bits on every
// CPU. Rounding may leave a value that should be 0 below it: those are 0. Finite input; rank at least 1. Allocates
// rank² doubles; rank²·(columns + 4/3·rank) operations; called under FloatEnv.
void squaredSingularValues(double* out, const float* r, size_t rank, size_t columns);

// The effective rank of a matrix: the least r with Σ_{i≤r} σ² >= `energy`·Σ σ², 0 where all are 0 (DiLoCoX, arXiv
// 2506.21263, section 2.4.3). `squares` are its `count` squared singular values, descending; not finite: `count`.
size_t effectiveRank(const double* squares, size_t count, double energy);

}  // namespace lowcomm

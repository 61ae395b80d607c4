#pragma once

#include <cstddef>

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

}  // namespace lowcomm

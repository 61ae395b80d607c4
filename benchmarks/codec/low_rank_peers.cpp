// The functions that low_rank_peers.py times: the products of low-rank compression on raw memory, in a library without
// torch.
#include <cstddef>

#include "base/float_env.h"
#include "kernels/isa/table.h"
#include "kernels/low_rank/low_rank.h"

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// 0: p = A·Q, 1: r = Aᵀ·P, 2: out = P·Rᵀ, 3: out = A − P·Rᵀ, 4: p orthonormalised.
EXPORTED void low_rank(int product, float* out, const float* a, float* p, float* r, size_t rows, size_t columns,
                       size_t rank) {
  using namespace lowcomm;
  const LowRankKernels& loops = *kernels().low_rank;
  FloatEnv env;
  if (product == 0) loops.project(p, a, r, rows, columns, rank);
  if (product == 1) loops.back_project(r, a, p, rows, columns, rank);
  if (product == 2) loops.expand(out, p, r, rows, columns, rank);
  if (product == 3) loops.subtract(out, a, p, r, rows, columns, rank);
  if (product == 4) orthonormalise(p, rank, rows);
}

EXPORTED const char* kernels_name() {
  return lowcomm::kernelsName();
}
}

// A random projection of what a product of factors leaves out.
#include <vector>

#include "kernels/isa/table.h"
#include "kernels/low_rank/low_rank.h"
#include "kernels/low_rank/signs.h"

namespace lowcomm {

void probeRest(float* out, float* sums, const float* omega, const float* p, const float* r, size_t rows, size_t columns,
               size_t rank, uint64_t seed) {
  const LowRankKernels& kernels = *lowcomm::kernels().low_rank;
  std::vector<float> captured(rank), signs(rows);
  kernels.project(captured.data(), r, omega, rank, columns, 1);
  kernels.subtract(sums, sums, p, captured.data(), rows, 1, rank);
  drawSigns(signs.data(), rows, ~seed);
  for (size_t k = 0; k < kProbes; ++k)
    out[k] = 0;
  for (size_t i = 0; i < rows; ++i)
    out[i % kProbes] += signs[i] * sums[i];
}

}  // namespace lowcomm

// The reference of the low-rank products: the order of every sum as low_rank.h states it.
#include "kernels/low_rank/low_rank.h"

#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

constexpr size_t kPartials = 16;

float dot(const float* a, const float* q, size_t columns) {
  float s[kPartials] = {};
  for (size_t j = 0; j < columns; ++j)
    s[j % kPartials] += a[j] * q[j];
  for (size_t h = kPartials / 2; h > 0; h /= 2) {
    for (size_t l = 0; l < h; ++l)
      s[l] += s[l + h];
  }
  return s[0];
}

void project(float* p, const float* a, const float* q, size_t rows, size_t columns, size_t rank) {
  for (size_t i = 0; i < rows; ++i) {
    for (size_t k = 0; k < rank; ++k)
      p[k * rows + i] = dot(a + i * columns, q + k * columns, columns);
  }
}

void backProject(float* r, const float* a, const float* p, size_t rows, size_t columns, size_t rank) {
  for (size_t e = 0; e < rank * columns; ++e)
    r[e] = 0;
  for (size_t i = 0; i < rows; ++i) {
    for (size_t k = 0; k < rank; ++k) {
      for (size_t j = 0; j < columns; ++j)
        r[k * columns + j] += a[i * columns + j] * p[k * rows + i];
    }
  }
}

template <bool kSubtract>
void combine(float* out, const float* a, const float* p, const float* r, size_t rows, size_t columns, size_t rank) {
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) {
      float sum = 0;
      for (size_t k = 0; k < rank; ++k)
        sum += p[k * rows + i] * r[k * columns + j];
      out[i * columns + j] = kSubtract ? a[i * columns + j] - sum : sum;
    }
  }
}

void expand(float* out, const float* p, const float* r, size_t rows, size_t columns, size_t rank) {
  combine<false>(out, nullptr, p, r, rows, columns, rank);
}

}  // namespace

namespace scalar {
constexpr LowRankKernels kLowRank = {project, backProject, expand, combine<true>};
}  // namespace scalar

}  // namespace lowcomm

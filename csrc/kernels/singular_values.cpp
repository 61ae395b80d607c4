#include "kernels/singular_values.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

namespace lowcomm {
namespace {

constexpr int kSweeps = 60;  // cyclic Jacobi converges quadratically: about ten for any matrix of this kind

// One rotation that makes element (p, q) of the symmetric n x n matrix zero (Golub, Van Loan: Matrix
// Computations, 8.5).
void rotate(double* a, size_t n, size_t p, size_t q) {
  const double theta = (a[q * n + q] - a[p * n + p]) / (2 * a[p * n + q]);
  const double t = (theta >= 0 ? 1.0 : -1.0) / (std::fabs(theta) + std::sqrt(theta * theta + 1));
  const double c = 1 / std::sqrt(t * t + 1), s = t * c;
  for (size_t k = 0; k < n; ++k) {
    const double kp = a[k * n + p], kq = a[k * n + q];
    a[k * n + p] = c * kp - s * kq;
    a[k * n + q] = s * kp + c * kq;
  }
  for (size_t k = 0; k < n; ++k) {
    const double pk = a[p * n + k], qk = a[q * n + k];
    a[p * n + k] = c * pk - s * qk;
    a[q * n + k] = s * pk + c * qk;
  }
}

}  // namespace

void squaredSingularValues(double* out, const float* r, size_t rank, size_t columns) {
  std::vector<double> a(rank * rank);
  double trace = 0;
  for (size_t i = 0; i < rank; ++i) {
    for (size_t j = i; j < rank; ++j) {
      double sum = 0;
      for (size_t k = 0; k < columns; ++k)
        sum += static_cast<double>(r[i * columns + k]) * r[j * columns + k];
      a[i * rank + j] = a[j * rank + i] = sum;
    }
    trace += a[i * rank + i];
  }
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    bool rotated = false;
    for (size_t p = 0; p + 1 < rank; ++p) {
      for (size_t q = p + 1; q < rank; ++q) {
        // Off-diagonal elements below this change no eigenvalue by more than a unit of the trace.
        if (std::fabs(a[p * rank + q]) <= 1e-17 * trace) continue;
        rotate(a.data(), rank, p, q);
        rotated = true;
      }
    }
    if (!rotated) break;
  }
  for (size_t i = 0; i < rank; ++i)
    out[i] = std::max(0.0, a[i * rank + i]);
  std::sort(out, out + rank, std::greater<>());
}

size_t effectiveRank(const double* squares, size_t count, double energy) {
  double whole = 0;
  for (size_t i = 0; i < count; ++i)
    whole += squares[i];
  double part = 0;
  for (size_t i = 0; i < count; ++i) {
    if (part >= energy * whole) return i;
    part += squares[i];
  }
  return count;
}

}  // namespace lowcomm

#include "kernels/low_rank/low_rank.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

namespace lowcomm {
namespace {

constexpr size_t kTile = 4;
constexpr int kIterations = 60;  // a value: QR with Wilkinson's shift takes two or three

// a = r·rᵀ, [n, n]. Every sum by ascending column; those of a tile's elements side by side, for each waits for itself.
void gram(double* a, const float* r, size_t n, size_t columns) {
  for (size_t i = 0; i < n; i += kTile) {
    for (size_t j = i; j < n; j += kTile) {
      const size_t rows = std::min(kTile, n - i), others = std::min(kTile, n - j);
      const float *x[kTile], *y[kTile];
      for (size_t t = 0; t < kTile; ++t) {
        x[t] = r + (i + std::min(t, rows - 1)) * columns;
        y[t] = r + (j + std::min(t, others - 1)) * columns;
      }
      double sum[kTile][kTile] = {};
      for (size_t k = 0; k < columns; ++k) {
        double right[kTile];
        for (size_t u = 0; u < kTile; ++u)
          right[u] = static_cast<double>(y[u][k]);
        for (size_t t = 0; t < kTile; ++t) {
          const auto left = static_cast<double>(x[t][k]);
          for (size_t u = 0; u < kTile; ++u)
            sum[t][u] += left * right[u];
        }
      }
      for (size_t t = 0; t < rows; ++t) {
        for (size_t u = 0; u < others; ++u)
          a[(i + t) * n + j + u] = a[(j + u) * n + i + t] = sum[t][u];
      }
    }
  }
}

// Householder reflections that make the symmetric n x n matrix tridiagonal: diagonal d, next to it e (n - 1 elements).
// Golub, Van Loan: Matrix Computations, 8.3.1. `a` is overwritten; v and w are scratch of n elements.
void tridiagonalise(double* a, size_t n, double* d, double* e, double* v, double* w) {
  for (size_t k = 0; k + 1 < n; ++k) {
    d[k] = a[k * n + k];
    const double* row = a + k * n;  // by symmetry the column below the diagonal
    double rest = 0;
    for (size_t i = k + 2; i < n; ++i)
      rest += row[i] * row[i];
    if (!(rest > 0)) {  // nothing to reflect
      e[k] = row[k + 1];
      continue;
    }
    const double length = rest + row[k + 1] * row[k + 1];
    const double alpha = row[k + 1] > 0 ? -std::sqrt(length) : std::sqrt(length);
    e[k] = alpha;
    for (size_t i = k + 1; i < n; ++i)
      v[i] = row[i];
    v[k + 1] -= alpha;
    const double half = length - alpha * row[k + 1];  // vᵀv / 2
    std::fill(w + k + 1, w + n, 0.0);
    for (size_t j = k + 1; j < n; ++j) {
      const double by = v[j] / half;
      const double* column = a + j * n;
      for (size_t i = k + 1; i < n; ++i)
        w[i] += by * column[i];
    }
    double inner = 0;
    for (size_t i = k + 1; i < n; ++i)
      inner += w[i] * v[i];
    const double by = inner / (2 * half);
    for (size_t i = k + 1; i < n; ++i)
      w[i] -= by * v[i];
    for (size_t j = k + 1; j < n; ++j) {
      double* column = a + j * n;
      const double vj = v[j], wj = w[j];
      for (size_t i = k + 1; i < n; ++i)
        column[i] -= v[i] * wj + w[i] * vj;
    }
  }
  d[n - 1] = a[n * n - 1];
}

// One implicit QR step with Wilkinson's shift on rows low..high of a tridiagonal matrix (there, 8.3.2).
void qrStep(double* d, double* e, size_t low, size_t high) {
  const double delta = (d[high - 1] - d[high]) / 2, last = e[high - 1];
  const double root = std::sqrt(delta * delta + last * last);
  double x = d[low] - (d[high] - last * last / (delta + (delta < 0 ? -root : root))), z = e[low];
  for (size_t k = low; k < high; ++k) {
    const double length = std::sqrt(x * x + z * z);
    if (k > low) e[k - 1] = length;
    if (!(length > 0)) return;  // the bulge is gone
    const double c = x / length, s = z / length;
    const double p = d[k], q = d[k + 1], b = e[k];
    d[k] = c * c * p + 2 * c * s * b + s * s * q;
    d[k + 1] = s * s * p - 2 * c * s * b + c * c * q;
    e[k] = c * s * (q - p) + (c * c - s * s) * b;
    if (k + 1 == high) return;
    x = e[k];
    z = s * e[k + 1];
    e[k + 1] *= c;
  }
}

}  // namespace

void squaredSingularValues(double* out, const float* r, size_t rank, size_t columns) {
  std::vector<double> a(rank * rank), e(rank), v(rank), w(rank);
  gram(a.data(), r, rank, columns);
  double trace = 0;
  for (size_t i = 0; i < rank; ++i)
    trace += a[i * rank + i];
  tridiagonalise(a.data(), rank, out, e.data(), v.data(), w.data());
  // Elements next to the diagonal below this change no eigenvalue by more than a unit of the trace.
  const auto negligible = [&](size_t i) { return std::fabs(e[i]) <= 1e-17 * trace; };
  size_t high = rank - 1;
  for (size_t left = kIterations * rank; high > 0 && left > 0; --left) {
    if (negligible(high - 1)) {
      --high;
      continue;
    }
    size_t low = high - 1;
    while (low > 0 && !negligible(low - 1))
      --low;
    qrStep(out, e.data(), low, high);
  }
  for (size_t i = 0; i < rank; ++i)
    out[i] = std::max(0.0, out[i]);
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

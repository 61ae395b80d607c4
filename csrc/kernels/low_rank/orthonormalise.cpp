#include "kernels/low_rank/low_rank.h"

#include <cmath>
#include <vector>

namespace lowcomm {
namespace {

// Random numbers of ±1, the same for the same `state` everywhere: element i by bit i mod 64 of splitmix64's number i
// div 64 (Steele, Lea, Flood; OOPSLA 2014).
template <class T>
void drawSigns(T* out, size_t n, uint64_t state) {
  uint64_t bits = 0;
  for (size_t i = 0; i < n; ++i, bits >>= 1) {
    if (i % 64 == 0) {
      uint64_t z = state += 0x9e3779b97f4a7c15u;
      z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
      z = (z ^ z >> 27) * 0x94d049bb133111ebu;
      bits = z ^ z >> 31;
    }
    out[i] = bits & 1 ? T{1} : T{-1};
  }
}

constexpr size_t kPartials = 8;

double dot(const double* a, const double* b, size_t n) {
  double s[kPartials] = {};
  size_t i = 0;
  for (; i + kPartials <= n; i += kPartials) {
    for (size_t l = 0; l < kPartials; ++l)
      s[l] += a[i + l] * b[i + l];
  }
  for (size_t l = 0; i + l < n; ++l)
    s[l] += a[i + l] * b[i + l];
  for (size_t h = kPartials / 2; h > 0; h /= 2) {
    for (size_t l = 0; l < h; ++l)
      s[l] += s[l + h];
  }
  return s[0];
}

// Takes the `before` vectors at `basis` out of v and gives it length 1; false where too little is left.
bool normalise(double* v, const double* basis, size_t before, size_t n) {
  const double whole = std::sqrt(dot(v, v, n));
  for (size_t k = 0; k < before; ++k) {
    const double* b = basis + k * n;
    const double share = dot(b, v, n);
    for (size_t i = 0; i < n; ++i)
      v[i] -= share * b[i];
  }
  const double left = std::sqrt(dot(v, v, n));
  if (!(left > kDependent * whole)) return false;
  const double inverse = 1.0 / left;
  for (size_t i = 0; i < n; ++i)
    v[i] *= inverse;
  return true;
}

size_t orthonormaliseRows(double* x, size_t count, size_t n, const uint64_t* seed) {
  size_t zeros = 0;
  for (size_t k = 0; k < count; ++k) {
    double* v = x + k * n;
    bool left = normalise(v, x, k, n);
    if (!left && seed) {
      drawSigns(v, n, *seed ^ (k + 1) * 0xd1342543de82ef95u);
      left = normalise(v, x, k, n);
    }
    for (size_t i = 0; !left && i < n; ++i)
      v[i] = 0;
    zeros += !left;
  }
  return zeros;
}

size_t run(float* x, size_t count, size_t n, const uint64_t* seed) {
  std::vector<double> basis(x, x + count * n);
  const size_t zeros = orthonormaliseRows(basis.data(), count, n, seed);
  for (size_t i = 0; i < count * n; ++i)
    x[i] = static_cast<float>(basis[i]);
  return zeros;
}

}  // namespace

size_t orthonormalise(float* x, size_t count, size_t length) {
  return run(x, count, length, nullptr);
}

size_t orthonormalise(double* x, size_t count, size_t length) {
  return orthonormaliseRows(x, count, length, nullptr);
}

size_t orthonormaliseWhole(float* x, size_t count, size_t length, uint64_t seed) {
  return run(x, count, length, &seed);
}

}  // namespace lowcomm

#include "kernels/low_rank/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "base/float_env.h"
#include "grid_cases.h"
#include "sha256.h"

namespace lowcomm {
namespace {

double dot(const float* a, const float* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i)
    sum += double{a[i]} * b[i];
  return sum;
}

// Vectors of length 1 at right angles except for their rounding to fp32; or zero, where `zeros` allows it.
void expectOrthonormal(const std::vector<float>& x, size_t count, size_t n, size_t zeros) {
  size_t found = 0;
  for (size_t k = 0; k < count; ++k) {
    const double length = dot(&x[k * n], &x[k * n], n);
    if (length == 0) {
      ++found;
    } else {
      EXPECT_NEAR(length, 1, 4 * 0x1p-24) << "vector " << k << " of " << count << " x " << n;
    }
    for (size_t other = 0; other < k; ++other)
      EXPECT_NEAR(dot(&x[k * n], &x[other * n], n), 0, 4 * 0x1p-24) << other << ", " << k;
  }
  EXPECT_EQ(found, zeros);
}

TEST(Orthonormalise, AnySize) {
  FloatEnv env;
  for (size_t count : {1, 2, 4, 7, 16}) {
    for (size_t n : {16, 17, 31, 64, 1000}) {
      std::vector<float> x = test::normal(count * n, static_cast<uint32_t>(n + count), 1e-4f);
      EXPECT_EQ(orthonormalise(x.data(), count, n), 0u);
      expectOrthonormal(x, count, n, 0);
    }
  }
}

TEST(Orthonormalise, KeepsTheSpan) {
  FloatEnv env;
  constexpr size_t kCount = 3, kLength = 40;
  const std::vector<float> before = test::normal(kCount * kLength, 3);
  std::vector<float> x = before;
  orthonormalise(x.data(), kCount, kLength);
  for (size_t k = 0; k < kCount; ++k) {  // what the first k + 1 new vectors leave of the old one is nothing
    std::vector<double> rest(before.begin() + k * kLength, before.begin() + (k + 1) * kLength);
    for (size_t b = 0; b <= k; ++b) {
      const double share = dot(&before[k * kLength], &x[b * kLength], kLength);
      for (size_t i = 0; i < kLength; ++i)
        rest[i] -= share * x[b * kLength + i];
    }
    for (double left : rest)
      EXPECT_NEAR(left, 0, 1e-5);
    EXPECT_GT(dot(&before[k * kLength], &x[k * kLength], kLength), 0) << "turned round";
  }
}

TEST(Orthonormalise, WhatDependsBecomesZero) {
  FloatEnv env;
  constexpr size_t kLength = 100;
  std::vector<float> x = test::normal(5 * kLength, 8);
  for (size_t i = 0; i < kLength; ++i) {
    x[1 * kLength + i] = -2 * x[i];                         // the first again
    x[2 * kLength + i] = 0;                                 // nothing
    x[4 * kLength + i] = x[i] + 0.5f * x[3 * kLength + i];  // a sum of others
  }
  std::vector<float> whole = x;
  EXPECT_EQ(orthonormalise(x.data(), 5, kLength), 3u);
  expectOrthonormal(x, 5, kLength, 3);
  // A basis that must stay whole gets new directions there, the same for one seed and others for another.
  std::vector<float> again = whole, other = whole;
  EXPECT_EQ(orthonormaliseWhole(whole.data(), 5, kLength, 7), 0u);
  expectOrthonormal(whole, 5, kLength, 0);
  orthonormaliseWhole(again.data(), 5, kLength, 7);
  orthonormaliseWhole(other.data(), 5, kLength, 8);
  EXPECT_EQ(again, whole);
  EXPECT_NE(other, whole);
}

TEST(Orthonormalise, OfZerosAloneNothingIsLeft) {
  FloatEnv env;
  std::vector<float> x(4 * 64);
  EXPECT_EQ(orthonormalise(x.data(), 4, 64), 4u);
  EXPECT_EQ(x, std::vector<float>(4 * 64));
  EXPECT_EQ(orthonormaliseWhole(x.data(), 4, 64, 1), 0u);
  expectOrthonormal(x, 4, 64, 0);
  EXPECT_EQ(orthonormalise(x.data(), 0, 64), 0u);
}

// Magnitudes whose squares leave fp32 are no matter.
TEST(Orthonormalise, AnyMagnitude) {
  FloatEnv env;
  for (float scale : {1e-38f, 1e-30f, 1e30f}) {
    std::vector<float> x = test::normal(3 * 50, 9, scale);
    EXPECT_EQ(orthonormalise(x.data(), 3, 50), 0u);
    expectOrthonormal(x, 3, 50, 0);
  }
}

// The bits that every machine must have: an order of sums that changed would show here.
TEST(Orthonormalise, KnownBits) {
  FloatEnv env;
  std::vector<float> x(3 * 21);
  uint32_t state = 1;
  for (float& v : x) {
    state = state * 1664525u + 1013904223u;
    v = static_cast<float>(static_cast<int32_t>(state) >> 8) * 0x1p-23f;
  }
  orthonormalise(x.data(), 3, 21);
  EXPECT_EQ(test::sha256(std::as_bytes(std::span(x))),
            "cdc60b835a0c0dc6b17e677a532b0f1b8b93131f1460e33128a54d7b85b10e0b");
}

}  // namespace
}  // namespace lowcomm

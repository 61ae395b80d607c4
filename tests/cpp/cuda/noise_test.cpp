// The CUDA perturbations against the scalar ones, bit for bit; simulated and on a device, as grid_test.cpp.
#include "cuda/noise.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/narrow_float.h"
#include "cuda/on_device.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::OnDevice;

class CudaNoise : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

constexpr uint32_t kStream = 5;  // a parameter's

std::vector<NoiseTerm> someTerms(size_t count, uint32_t stream) {
  std::vector<NoiseTerm> terms(count);
  for (size_t i = 0; i < count; ++i)
    terms[i] = {{noiseSeed(1, 2, 3, i), stream, 0}, 0.37f * static_cast<float>(i + 1) * (i % 3 == 0 ? -1.0f : 1.0f)};
  return terms;
}

// x's elements [offset, offset + count) are the tensor's from `first` on.
template <class T>
void expectSame(Noise noise, DType dtype, const std::vector<T>& x, uint64_t first, size_t offset, size_t terms,
                bool with_x = true) {
  const std::string name = std::string(dtypeName(dtype)) + " " + std::to_string(x.size()) + " from " +
                           std::to_string(first) + ", terms " + std::to_string(terms);
  // The list on the device is all parameters'.
  const std::vector<NoiseTerm> all = someTerms(terms, kStream), list = someTerms(terms, 0);
  const size_t count = x.size() - offset;
  std::vector<T> expected = x;
  addNoise(*scalarKernels(), noise, expected.data() + offset, with_x ? x.data() + offset : nullptr, dtype, first, count,
           all);
  OnDevice<NoiseTerm> there{std::span<const NoiseTerm>(list)};
  for (bool carried : {true, false}) {
    if (carried && terms > cuda::kCarriedTerms) continue;
    OnDevice<T> source{std::span<const T>(x)}, out{std::span<const T>(x)};
    for (bool in_place : {false, true}) {
      T* to = (in_place ? source : out).data() + offset;
      const T* from = with_x ? source.data() + offset : nullptr;
      if (carried) {
        cuda::addNoise({}, noise, to, from, dtype, first, count, list, kStream);
      } else {
        cuda::addNoise({}, noise, to, from, dtype, first, count, there.data(), terms, kStream);
      }
      const std::vector<T> got = (in_place ? source : out).host();
      ASSERT_TRUE(x.empty() || std::memcmp(got.data(), expected.data(), x.size() * sizeof(T)) == 0)
          << name << ", carried " << carried;
    }
  }
}

constexpr Noise kBoth[] = {Noise::gaussian, Noise::rademacher};

TEST_F(CudaNoise, EverySizeAndSliceEqualsScalar) {
  for (Noise noise : kBoth) {
    for (size_t n : {0, 1, 15, 16, 17, 63, 64, 511, 512, 513, 2047, 2048, 2049, 9000}) {
      for (uint64_t first : {uint64_t{0}, uint64_t{4}, uint64_t{2047}, uint64_t{2048}}) {
        ASSERT_NO_FATAL_FAILURE(expectSame(noise, DType::float32, test::normal(n, 1), first, 0, 2));
      }
    }
  }
}

TEST_F(CudaNoise, EveryNumberOfTermsEqualsScalar) {
  for (Noise noise : kBoth) {
    for (size_t terms : {1, 2, 3, 4, 5, 7, 8, 16, 17}) {
      ASSERT_NO_FATAL_FAILURE(expectSame(noise, DType::float32, test::normal(3000, 1), 100, 0, terms));
      ASSERT_NO_FATAL_FAILURE(expectSame(noise, DType::float32, test::normal(3000, 1), 100, 0, terms, false));
    }
  }
}

TEST_F(CudaNoise, ElementsBeyond2To36) {
  for (Noise noise : kBoth) {
    for (uint64_t first : {(uint64_t{1} << 36) - 700, (uint64_t{1} << 38) * 5, (uint64_t{1} << 41) + 3}) {
      ASSERT_NO_FATAL_FAILURE(expectSame(noise, DType::float32, test::normal(5000, 1), first, 0, 3));
    }
  }
}

TEST_F(CudaNoise, UnalignedElements) {
  for (Noise noise : kBoth) {
    for (size_t offset : {1, 2, 3}) {
      ASSERT_NO_FATAL_FAILURE(expectSame(noise, DType::float32, test::normal(5000, 1), 0, offset, 2));
      ASSERT_NO_FATAL_FAILURE(expectSame(noise, DType::float32, test::normal(5000, 1), offset, offset, 2));
    }
  }
}

TEST_F(CudaNoise, MoreThanALaunchHoldsAtOnce) {
  for (Noise noise : kBoth) {
    const size_t n = noise == Noise::gaussian ? 65 * 4 * 512 + 77 : 65 * 4 * 2048 + 77;
    ASSERT_NO_FATAL_FAILURE(expectSame(noise, DType::float32, test::normal(n, 1), 0, 0, 1));
  }
}

TEST_F(CudaNoise, SixteenBitElements) {
  for (Noise noise : kBoth) {
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      std::vector<uint16_t> x(5001);
      const std::vector<float> wide = test::normal(x.size(), 5, 1e-3f);
      for (size_t i = 0; i < x.size(); ++i)
        x[i] = dtype == DType::float16 ? floatToFloat16(wide[i]) : floatToBfloat16(wide[i]);
      for (size_t offset : {0, 1}) {
        ASSERT_NO_FATAL_FAILURE(expectSame(noise, dtype, x, 2048, offset, 5));
      }
    }
  }
}

TEST(CudaNoiseErrors, WhatIsNoSumIsRefused) {
  float x = 1;
  const NoiseTerm term;
  EXPECT_THROW(cuda::addNoise({}, Noise::gaussian, &x, &x, DType::float32, 0, 1, &term, 0, 0), ValueError);
  EXPECT_THROW(cuda::addNoise({}, Noise::gaussian, &x, &x, DType::float64, 0, 1, &term, 1, 0), TypeError);
  EXPECT_THROW(cuda::addNoise({}, Noise::gaussian, &x, nullptr, DType::float16, 0, 1, &term, 1, 0), TypeError);
  const std::vector<NoiseTerm> many(cuda::kCarriedTerms + 1);
  EXPECT_THROW(cuda::addNoise({}, Noise::gaussian, &x, &x, DType::float32, 0, 1, many, 0), ValueError);
}

}  // namespace
}  // namespace lowcomm

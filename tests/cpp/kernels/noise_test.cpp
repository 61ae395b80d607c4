#include "kernels/noise/noise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/float_env.h"
#include "base/narrow_float.h"
#include "grid_cases.h"
#include "kernels/noise/noise_rules.h"
#include "sha256.h"

namespace lowcomm {
namespace {

using test::normal;

constexpr Noise kKinds[] = {Noise::gaussian, Noise::rademacher};
// Counters of more than 32 bits, and the elements on both sides of where they begin.
constexpr uint64_t kFirsts[] = {0,         1, 15, 63, 64, 100, 2047, 2048, 2049, (1ull << 34) - 33, (1ull << 39) - 5,
                                1ull << 41};
constexpr size_t kCounts[] = {0, 1, 15, 16, 17, 63, 64, 65, 511, 2047, 2048, 2049, 4097, 6500};

std::vector<NoiseTerm> terms(size_t count) {
  std::vector<NoiseTerm> list;
  for (size_t k = 0; k < count; ++k) {
    const float factor = (k % 3 == 0 ? -1.0f : 1.0f) * 0.37f / static_cast<float>(k * k + 1);
    list.push_back({{noiseSeed(7, k, 11, 2 * k), 3, 0}, factor});
  }
  return list;
}

std::vector<float> sums(const KernelTable& form, Noise kind, uint64_t first, size_t count,
                        const std::vector<NoiseTerm>& list) {
  std::vector<float> out(count, -99);
  addNoise(form, kind, out.data(), nullptr, DType::float32, first, count, list);
  return out;
}

std::vector<uint32_t> bits(const std::vector<float>& x) {
  std::vector<uint32_t> out(x.size());
  if (!x.empty()) std::memcpy(out.data(), x.data(), x.size() * 4);
  return out;
}

class NoiseForms : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Noise, NoiseForms, testing::ValuesIn(test::allForms()), test::formName);

TEST(Noise, SeedsAreChained) {
  EXPECT_EQ(noiseSeed(0, 0, 0, 0), 0x2130748aaac80268u);
  EXPECT_EQ(noiseSeed(1, 2, 3, 4), 0xd55ccd4aeb3ccafbu);
  EXPECT_NE(noiseSeed(1, 2, 3, 4), noiseSeed(2, 1, 3, 4));
}

// Values from an implementation that was written from FORMAT.md alone (tests/python/noise_by_hand.py).
TEST_P(NoiseForms, GoldenValues) {
  std::ifstream file(LOWCOMM_SOURCE_DIR "/tests/golden/noise.txt");
  int lines = 0;
  for (std::string line; std::getline(file, line); ++lines) {
    std::istringstream fields(line);
    std::string kind, hash;
    uint64_t first = 0;
    size_t count = 0;
    fields >> kind >> first >> count >> hash;
    const Noise noise = kind == "gaussian" ? Noise::gaussian : Noise::rademacher;
    const std::vector<float> z = sums(*GetParam(), noise, first, count, {{{noiseSeed(1, 2, 3, 4), 5, 0}, 1}});
    EXPECT_EQ(test::sha256(std::as_bytes(std::span(z))), hash) << line;
    for (size_t i = 0; i < 4; ++i) {
      uint32_t expected = 0;
      fields >> std::hex >> expected;
      EXPECT_EQ(floatBits(z.at(i)), expected) << line << ": " << i;
    }
  }
  EXPECT_EQ(lines, 10);
}

TEST_P(NoiseForms, EveryFormGivesTheScalarBits) {
  for (Noise kind : kKinds) {
    for (size_t count_terms : {1, 2, 3, 4, 5, 8, 11, 16}) {
      const auto list = terms(count_terms);
      for (uint64_t first : kFirsts) {
        const size_t count = first % 2 == 0 ? 6500 : 2200;
        ASSERT_EQ(bits(sums(*GetParam(), kind, first, count, list)),
                  bits(sums(*scalarKernels(), kind, first, count, list)))
            << count_terms << " terms from " << first;
      }
    }
  }
}

TEST_P(NoiseForms, ASliceIsThatOfTheWhole) {
  for (Noise kind : kKinds) {
    for (size_t count_terms : {1, 3, 6}) {
      const auto list = terms(count_terms);
      const std::vector<uint32_t> whole = bits(sums(*GetParam(), kind, 0, 10000, list));
      for (uint64_t first : {0, 1, 15, 17, 64, 1000, 2047, 2048, 3001}) {
        for (size_t count : kCounts) {
          const std::vector<uint32_t> slice = bits(sums(*GetParam(), kind, first, count, list));
          ASSERT_TRUE(std::equal(slice.begin(), slice.end(), whole.begin() + static_cast<ptrdiff_t>(first)))
              << count << " from " << first;
        }
      }
    }
  }
}

// Groups of four from the first term on, then the groups, then the element.
TEST_P(NoiseForms, TheOrderOfTheSum) {
  const std::vector<float> x = normal(5000, 1);
  for (Noise kind : kKinds) {
    for (size_t count_terms = 0; count_terms <= 10; ++count_terms) {
      const auto list = terms(count_terms);
      std::vector<float> expected(x.size(), 0.0f), group(x.size(), 0.0f);
      for (size_t k = 0; k < count_terms; ++k) {
        const std::vector<float> z = sums(*scalarKernels(), kind, 77, x.size(), {{list[k].key, 1}});
        for (size_t i = 0; i < x.size(); ++i) {
          volatile float product = list[k].factor * z[i];
          group[i] = k % 4 == 0 ? product : group[i] + product;
          if (k % 4 == 3 || k + 1 == count_terms) expected[i] = k < 4 ? group[i] : expected[i] + group[i];
        }
      }
      for (size_t i = 0; i < x.size(); ++i)
        expected[i] = count_terms > 0 ? x[i] + expected[i] : x[i];
      std::vector<float> apart(x.size()), inside = x;
      addNoise(*GetParam(), kind, apart.data(), x.data(), DType::float32, 77, x.size(), list);
      addNoise(*GetParam(), kind, inside.data(), inside.data(), DType::float32, 77, x.size(), list);
      ASSERT_EQ(bits(apart), bits(expected)) << count_terms;
      ASSERT_EQ(bits(inside), bits(expected)) << count_terms;
    }
  }
}

TEST_P(NoiseForms, SixteenBitElementsAreRoundedOnce) {
  const std::vector<float> values = normal(7000, 2);
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    const auto narrow = dtype == DType::float16 ? floatToFloat16 : floatToBfloat16;
    const auto widen = dtype == DType::float16 ? float16ToFloat : bfloat16ToFloat;
    for (Noise kind : kKinds) {
      for (size_t count_terms : {0, 1, 4, 7}) {
        for (uint64_t first : {0, 5, 2048}) {
          const auto list = terms(count_terms);
          std::vector<uint16_t> x(values.size()), out(x.size());
          std::vector<float> wide(x.size());
          for (size_t i = 0; i < x.size(); ++i)
            wide[i] = widen(x[i] = narrow(values[i]));
          addNoise(*GetParam(), kind, wide.data(), wide.data(), DType::float32, first, wide.size(), list);
          addNoise(*GetParam(), kind, out.data(), x.data(), dtype, first, x.size(), list);
          addNoise(*GetParam(), kind, x.data(), x.data(), dtype, first, x.size(), list);
          for (size_t i = 0; i < x.size(); ++i)
            ASSERT_EQ(out[i], narrow(wide[i])) << dtypeName(dtype) << " " << i;
          ASSERT_EQ(x, out);
        }
      }
    }
  }
}

TEST_P(NoiseForms, WithoutTermsNothingIsAdded) {
  std::vector<float> x = normal(100, 3), y(100, 7.0f);
  addNoise(*GetParam(), Noise::gaussian, y.data(), x.data(), DType::float32, 0, 100, {});
  EXPECT_EQ(y, x);
  addNoise(*GetParam(), Noise::gaussian, y.data(), nullptr, DType::float32, 0, 100, {});
  EXPECT_EQ(y, std::vector<float>(100, 0.0f));
}

TEST_P(NoiseForms, TensorsAndSeedsHaveNumbersOfTheirOwn) {
  for (Noise kind : kKinds) {
    const auto z = [&](PhiloxKey key) { return sums(*GetParam(), kind, 0, 4096, {{key, 1}}); };
    EXPECT_NE(z({1, 0, 0}), z({2, 0, 0}));
    EXPECT_NE(z({1, 0, 0}), z({1, 1, 0}));
    EXPECT_NE(z({1, 0, 0}), z({1ull << 32, 0, 0}));
  }
}

#if defined(__x86_64__)
// torch.set_flush_denormal of the caller changes nothing.
TEST_P(NoiseForms, TheControlRegisterIsIgnored) {
  const std::vector<NoiseTerm> tiny = {{{1, 0, 0}, 0x1p-130f}};
  for (Noise kind : kKinds) {
    const auto expected = bits(sums(*GetParam(), kind, 0, 5000, tiny));
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040 | 0x6000);  // flush to zero, denormals are zero, round toward zero
    const auto got = sums(*GetParam(), kind, 0, 5000, tiny);
    _mm_setcsr(saved);
    EXPECT_EQ(bits(got), expected);
  }
}
#endif

// Every angle and every radius there is, or a part of them where the build is slow.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr uint32_t kStride = 1;
#else
constexpr uint32_t kStride = 257;
#endif

TEST(Noise, GaussiansAreAccurate) {
  constexpr uint32_t kAll = 1u << 24;
  double angles = 0;
  for (uint32_t w = 0; w < kAll; w += kStride) {
    const CosineSine got = cosineSine(w << 8 | 0xa5);
    const double angle = static_cast<double>(w) * 0x1p-24 * 2 * M_PI;
    angles = std::max({angles, std::fabs(got.cosine - std::cos(angle)), std::fabs(got.sine - std::sin(angle))});
  }
  EXPECT_LT(angles, 7e-6);
  double radii = 0, values = 0;
  const auto check = [&](uint32_t a) {
    const double exact = std::sqrt(-2 * std::log((a + 0.5) * 0x1p-24));
    const double error = std::fabs(gaussianRadius(a << 8 | 0x5a) - exact);
    radii = std::max(radii, error);
    values = std::max(values, error + exact * angles);  // |R'X' - RX| <= |R' - R| + R·|X' - X|, |X'| <= 1
  };
  for (uint32_t a = 0; a < kAll; a += kStride)
    check(a);
  check(kAll - 1);  // the worst
  EXPECT_LT(radii, 1.1e-4);
  EXPECT_LT(values, 2e-4);
}

TEST_P(NoiseForms, Moments) {
  constexpr size_t kCount = 1 << 20;
  for (Noise kind : kKinds) {
    const std::vector<float> z = sums(*GetParam(), kind, 0, kCount, {{{42, 0, 0}, 1}});
    double mean = 0, square = 0, fourth = 0, neighbours = 0, rows = 0;
    for (size_t i = 0; i < kCount; ++i) {
      const double v = z[i];
      mean += v;
      square += v * v;
      fourth += v * v * v * v;
      neighbours += i > 0 ? v * z[i - 1] : 0;
      rows += i >= 16 ? v * z[i - 16] : 0;
    }
    const double n = kCount, sigma = 1 / std::sqrt(n);
    EXPECT_NEAR(mean / n, 0, 5 * sigma);
    EXPECT_NEAR(square / n, 1, 5 * std::sqrt(2) * sigma);
    EXPECT_NEAR(fourth / n, kind == Noise::gaussian ? 3 : 1, 5 * std::sqrt(96) * sigma);
    EXPECT_NEAR(neighbours / n, 0, 5 * sigma);
    EXPECT_NEAR(rows / n, 0, 5 * sigma);
  }
}

}  // namespace
}  // namespace lowcomm

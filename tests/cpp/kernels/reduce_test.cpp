#include "kernels/reduce.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/narrow_float.h"

namespace lowcomm {
namespace {

const ReduceKind kKinds[] = {ReduceKind::sum,     ReduceKind::product, ReduceKind::min,    ReduceKind::max,
                             ReduceKind::bit_and, ReduceKind::bit_or,  ReduceKind::bit_xor};
const size_t kSizes[] = {0, 1, 7, 64, 1000};
constexpr int kRanks = 5;

// Plain references, element by element. Integers are reduced in 64 bits and cut: two's complement wraps alike.
template <class A>
A reference(ReduceKind kind, A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    switch (kind) {
      case ReduceKind::sum:
        return static_cast<A>(x + y);
      case ReduceKind::product:
        return static_cast<A>(x * y);
      case ReduceKind::bit_and:
        return static_cast<A>(x & y);
      case ReduceKind::bit_or:
        return static_cast<A>(x | y);
      case ReduceKind::bit_xor:
        return static_cast<A>(x ^ y);
      default:
        break;
    }
  }
  if (kind == ReduceKind::sum) return a + b;
  if (kind == ReduceKind::product) return a * b;
  return kind == ReduceKind::min ? (b < a ? b : a) : (b > a ? b : a);
}

template <class T>
std::vector<T> randomElements(size_t n, uint32_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<T> x(n);
  for (T& v : x) {
    if constexpr (std::is_integral_v<T>) {
      v = static_cast<T>(generator());
    } else {
      v = static_cast<T>(static_cast<double>(generator() >> 11) / 9007199254740992.0 * 6 - 3);
    }
  }
  return x;
}

struct Half {
  DType dtype;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
};
const Half kHalves[] = {{DType::float16, float16ToFloat, floatToFloat16},
                        {DType::bfloat16, bfloat16ToFloat, floatToBfloat16}};

// Elements of T, accumulated in A: rounded once, at the end.
template <class T, class A>
void expectReduces(DType dtype, A (*widen)(T), T (*narrow)(A)) {
  for (ReduceKind kind : kKinds) {
    if (!reduceSupports(dtype, kind)) continue;
    for (size_t n : kSizes) {
      SCOPED_TRACE(std::string(dtypeName(dtype)) + " " + reduceName(kind) + " " + std::to_string(n));
      std::vector<A> acc(n), expected(n);
      std::vector<T> x(n), out(n), averaged(n), last(n), last_averaged(n);
      for (int rank = 0; rank < kRanks; ++rank) {
        const auto values = randomElements<A>(n, 10 + rank);
        for (size_t i = 0; i < n; ++i) {
          x[i] = narrow(values[i]);
          expected[i] = rank == 0 ? widen(x[i]) : reference(kind, expected[i], widen(x[i]));
        }
        if (rank == kRanks - 1) {
          reduceLast(last.data(), acc.data(), x.data(), dtype, kind, n, 0);
          reduceLast(last_averaged.data(), acc.data(), x.data(), dtype, kind, n, kRanks);
        }
        rank == 0 ? reduceAssign(acc.data(), x.data(), dtype, n) : reduceInto(acc.data(), x.data(), dtype, kind, n);
      }
      EXPECT_EQ(acc, expected);
      reduceFinish(out.data(), acc.data(), dtype, n, 0);
      reduceFinish(averaged.data(), acc.data(), dtype, n, kRanks);
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(out[i], narrow(expected[i]));
        ASSERT_EQ(averaged[i], narrow(widen(out[i]) / static_cast<A>(kRanks)));
      }
      EXPECT_EQ(last, out);
      EXPECT_EQ(last_averaged, averaged);
      if constexpr (std::is_same_v<T, A>) {
        reduceFinish(acc.data(), acc.data(), dtype, n, kRanks);  // in place
        EXPECT_EQ(acc, averaged);
      }
    }
  }
}

template <class T>
T itself(T value) {
  return value;
}

template <class T>
void expectReduces(DType dtype) {
  EXPECT_EQ(accumulatorType(dtype), dtype);
  expectReduces<T, T>(dtype, itself, itself);
}

TEST(Reduce, EveryTypeAndKindAgainstAReference) {
  expectReduces<float>(DType::float32);
  expectReduces<double>(DType::float64);
  expectReduces<int8_t>(DType::int8);
  expectReduces<uint8_t>(DType::uint8);
  expectReduces<int32_t>(DType::int32);
  expectReduces<int64_t>(DType::int64);
}

// Many small terms are not lost to a sum that has grown.
TEST(Reduce, HalvesAccumulateInFloat) {
  for (const Half& half : kHalves) {
    EXPECT_EQ(accumulatorType(half.dtype), DType::float32);
    expectReduces(half.dtype, half.widen, half.narrow);
    const uint16_t one = half.narrow(1);
    float acc = 4096;  // where both formats have a gap wider than 1
    for (int i = 0; i < 64; ++i)
      reduceInto(&acc, &one, half.dtype, ReduceKind::sum, 1);
    EXPECT_EQ(acc, 4160);
  }
}

TEST(Reduce, AverageTruncatesIntegersAndDividesFloats) {
  const int32_t sums[] = {7, -7, 1, 0};
  int32_t out[4];
  reduceFinish(out, sums, DType::int32, 4, 2);
  EXPECT_EQ(std::vector<int32_t>(out, out + 4), (std::vector<int32_t>{3, -3, 0, 0}));
  const float sum = 1;
  float third;
  reduceFinish(&third, &sum, DType::float32, 1, 3);
  EXPECT_EQ(third, 1.0f / 3);
}

// Terms of NaNs with signs and payloads, first or later, and of infinities that cancel; in place too.
TEST(Reduce, EveryNaNEndsAsTheSame) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> first = {floatOf(0xffc12345u), 1, kInfinity, -kInfinity, floatOf(0x7fa00001u), 2};
  const std::vector<float> second = {1, floatOf(0xff812345u), -kInfinity, kInfinity, floatOf(0xffc00000u), 3};
  for (int average_over : {0, 2}) {
    const float number = average_over ? 2.5f : 5;
    std::vector<float> sum = first;
    std::vector<float> last(sum.size());
    reduceLast(last.data(), sum.data(), second.data(), DType::float32, ReduceKind::sum, sum.size(), average_over);
    reduceInto(sum.data(), second.data(), DType::float32, ReduceKind::sum, sum.size());
    reduceFinish(sum.data(), sum.data(), DType::float32, sum.size(), average_over);
    EXPECT_EQ(std::memcmp(last.data(), sum.data(), sum.size() * sizeof(float)), 0);
    for (size_t i = 0; i < 5; ++i)
      EXPECT_EQ(floatBits(sum[i]), 0x7fc00000u) << i;
    EXPECT_EQ(sum[5], number);
    std::vector<double> wide(first.begin(), first.end());
    const std::vector<double> other(second.begin(), second.end());
    reduceInto(wide.data(), other.data(), DType::float64, ReduceKind::sum, wide.size());
    reduceFinish(wide.data(), wide.data(), DType::float64, wide.size(), average_over);
    for (size_t i = 0; i < 5; ++i)
      EXPECT_EQ(std::bit_cast<uint64_t>(wide[i]), 0x7ff8000000000000u) << i;
    EXPECT_EQ(wide[5], number);
    for (const Half& half : kHalves) {
      std::vector<uint16_t> a, b, out(first.size());
      for (size_t i = 0; i < first.size(); ++i) {
        a.push_back(half.narrow(first[i]));
        b.push_back(half.narrow(second[i]));
      }
      std::vector<float> acc(a.size());
      reduceAssign(acc.data(), a.data(), half.dtype, a.size());
      reduceInto(acc.data(), b.data(), half.dtype, ReduceKind::sum, b.size());
      reduceFinish(out.data(), acc.data(), half.dtype, out.size(), average_over);
      for (size_t i = 0; i < 5; ++i)
        EXPECT_EQ(out[i], half.dtype == DType::float16 ? 0x7e00 : 0x7fc0) << i;
      EXPECT_EQ(half.widen(out[5]), number);
    }
  }
}

TEST(Reduce, ScaleRoundsOnce) {
  for (double factor : {0.0, 1.0, 0.5, 1.0 / 3, -2.75}) {
    const auto x = randomElements<float>(1000, 3);
    const auto y = randomElements<double>(1000, 4);
    std::vector<float> scaled(x.size());
    std::vector<double> scaled_y(y.size());
    scale(scaled.data(), x.data(), DType::float32, factor, x.size());
    scale(scaled_y.data(), y.data(), DType::float64, factor, y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(scaled[i], x[i] * static_cast<float>(factor));
      ASSERT_EQ(scaled_y[i], y[i] * factor);
    }
    for (const Half& half : kHalves) {
      std::vector<uint16_t> h(x.size());
      for (size_t i = 0; i < x.size(); ++i)
        h[i] = half.narrow(x[i]);
      const std::vector<uint16_t> before = h;
      scale(h.data(), h.data(), half.dtype, factor, h.size());  // in place
      for (size_t i = 0; i < x.size(); ++i)
        ASSERT_EQ(h[i], half.narrow(half.widen(before[i]) * static_cast<float>(factor)));
    }
  }
}

TEST(Reduce, Supports) {
  for (DType dtype : {DType::opaque, DType::int16}) {
    for (ReduceKind kind : kKinds)
      EXPECT_FALSE(reduceSupports(dtype, kind)) << dtypeName(dtype);
  }
  for (DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
    for (ReduceKind kind : kKinds)
      EXPECT_EQ(reduceSupports(dtype, kind), kind < ReduceKind::bit_and) << dtypeName(dtype) << reduceName(kind);
  }
  for (DType dtype : {DType::int8, DType::uint8, DType::int32, DType::int64, DType::boolean}) {
    for (ReduceKind kind : kKinds)
      EXPECT_TRUE(reduceSupports(dtype, kind)) << dtypeName(dtype) << reduceName(kind);
  }
}

}  // namespace
}  // namespace lowcomm

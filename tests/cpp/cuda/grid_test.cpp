// The CUDA kernels against the scalar codec: the same bytes, the same values. Compiled twice: with the simulator's
// <cuda_runtime.h>, and with CUDA's for a device; skipped where that has none.
#include "cuda/grid.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "cuda/on_device.h"
#include "grid_cases.h"
#include "kernels/half.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::normal;
using test::OnDevice;

constexpr uint64_t kFarBlock = (uint64_t{1} << 36) / 512 * 5;  // beyond 2^36 elements: the counter's upper half counts

class CudaGrid : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

struct Case {
  int bits;
  uint32_t bucket;
  bool stochastic;

  GridCodec codec() const {
    const char* family = stochastic ? "qsgd" : "minmax";
    return test::gridCodec(family + std::to_string(bits) + ":bucket=" + std::to_string(bucket), *scalarKernels());
  }
  cuda::GridRun run(uint64_t count, DType dtype = DType::float32) const { return {bits, bucket, dtype, count}; }
};

const Draws kDraws{0x123456789abcdef0u, 22, 33};
constexpr PhiloxKey kKey{0x123456789abcdef0u, 22, 33};

// `offset` elements are left out in front, so that x is not aligned to more than its type.
template <class T>
Bytes encodedThere(const Case& c, const std::vector<T>& x, DType dtype, uint64_t block, uint32_t& refused,
                   size_t offset = 0) {
  std::vector<T> shifted(offset);
  shifted.insert(shifted.end(), x.begin(), x.end());
  OnDevice<T> there{std::span<const T>(shifted)};
  OnDevice<std::byte> payload(c.codec().encodedBytes(x.size(), dtype), std::byte{0xff});
  OnDevice<uint32_t> flag(1, refused);
  cuda::encodeGrid({}, c.run(x.size(), dtype), payload.data(), there.data() + offset, c.stochastic, block, kKey,
                   flag.data());
  refused = flag.host()[0];
  return payload.host();
}

template <class T>
std::vector<T> decodedThere(const Case& c, const Bytes& bytes, size_t count, DType dtype, uint32_t& refused,
                            size_t offset = 0) {
  OnDevice<std::byte> payload{std::span<const std::byte>(bytes)};
  OnDevice<T> y(count + offset, T{});
  OnDevice<uint32_t> flag(1, refused);
  cuda::decodeGrid({}, c.run(count, dtype), y.data() + offset, payload.data(), flag.data());
  refused = flag.host()[0];
  const std::vector<T> all = y.host();
  return {all.begin() + static_cast<ptrdiff_t>(offset), all.end()};
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {  // of the bits: -0 is not 0
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

void expectSame(const Case& c, size_t n, uint64_t block = 0, size_t offset = 0) {
  const GridCodec codec = c.codec();
  const std::string name = codec.spec().str() + " of " + std::to_string(n);
  const std::vector<float> x = normal(n, static_cast<uint32_t>(n), 3, 0.5f);
  uint32_t refused = 0;
  const Bytes expected = test::encoded(codec, x, kDraws, block * 512);
  const Bytes payload = encodedThere(c, x, DType::float32, block, refused, offset);
  ASSERT_TRUE(same(payload, expected)) << name;

  const std::vector<float> y = test::decoded(codec, expected, n);
  ASSERT_TRUE(same(decodedThere<float>(c, expected, n, DType::float32, refused, offset), y)) << name;

  std::vector<float> sum = x;
  codec.decodeAdd(sum.data(), DType::float32, expected, 0, n);
  OnDevice<std::byte> there{std::span<const std::byte>(expected)};
  OnDevice<float> acc{std::span<const float>(x)};
  OnDevice<uint32_t> flag(1, refused);
  cuda::decodeAddGrid({}, c.run(n), acc.data(), there.data(), flag.data());
  ASSERT_TRUE(same(acc.host(), sum)) << name;
  ASSERT_EQ(flag.host()[0], 0u) << name;
}

TEST_F(CudaGrid, EveryWidthBucketAndSizeEqualsScalar) {
  for (uint32_t bucket : {64u, 128u, 1024u, 4096u}) {
    for (size_t n : test::edgeSizes(bucket)) {
      for (int bits = 1; bits <= 8; ++bits) {
        for (bool stochastic : {false, true}) {
          ASSERT_NO_FATAL_FAILURE(expectSame({bits, bucket, stochastic}, n));
        }
      }
    }
  }
}

TEST_F(CudaGrid, OtherBuckets) {
  for (uint32_t bucket : {256u, 512u, 2048u, 8192u, 65536u}) {
    for (size_t n : {size_t{700}, size_t{bucket} + 1}) {
      ASSERT_NO_FATAL_FAILURE(expectSame({5, bucket, true}, n));
      ASSERT_NO_FATAL_FAILURE(expectSame({4, bucket, false}, n));
    }
  }
}

TEST_F(CudaGrid, MoreThanALaunchHoldsAtOnce) {
  for (uint32_t bucket : {64u, 1024u, 2048u}) {
    ASSERT_NO_FATAL_FAILURE(expectSame({3, bucket, true}, 65 * 4 * 1024 + 777));
  }
}

TEST_F(CudaGrid, BlocksBeyond2To36Elements) {
  for (uint32_t bucket : {64u, 1024u, 4096u}) {
    for (uint64_t block : {uint64_t{128}, kFarBlock}) {
      ASSERT_NO_FATAL_FAILURE(expectSame({4, bucket, true}, bucket + 513, block));
    }
  }
}

TEST_F(CudaGrid, UnalignedElements) {
  for (size_t offset : {1, 2, 3}) {
    for (uint32_t bucket : {64u, 1024u, 4096u}) {
      ASSERT_NO_FATAL_FAILURE(expectSame({4, bucket, false}, 4999, 0, offset));
    }
  }
}

TEST_F(CudaGrid, SixteenBitElements) {
  for (const Case& c : {Case{8, 1024, false}, {4, 64, true}, {3, 65536, false}, {5, 4096, true}}) {
    const GridCodec codec = c.codec();
    for (size_t n : {0, 1, 513, 2048, 5000, 70001}) {
      for (size_t offset : {0, 1}) {
        for (DType dtype : {DType::float16, DType::bfloat16}) {
          const bool half = dtype == DType::float16;
          std::vector<uint16_t> x(n), y(n);
          // Small enough for subnormal halves among them.
          const std::vector<float> wide = normal(n, 5, 1e-4f);
          for (size_t i = 0; i < n; ++i)
            x[i] = half ? floatToFloat16(wide[i]) : floatToBfloat16(wide[i]);
          uint32_t refused = 0;
          const Bytes expected = test::encoded(codec, x, kDraws, 0, dtype);
          ASSERT_TRUE(same(encodedThere(c, x, dtype, 0, refused, offset), expected)) << codec.spec().str() << " " << n;
          codec.decode(y.data(), dtype, expected, 0, n);
          ASSERT_TRUE(same(decodedThere<uint16_t>(c, expected, n, dtype, refused, offset), y))
              << codec.spec().str() << " " << n;
          ASSERT_EQ(refused, 0u);
        }
      }
    }
  }
}

TEST_F(CudaGrid, ZerosSubnormalsAndWideRanges) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> inputs = {
      {-0.0f, 0.0f, -0.0f},       {tiny, -tiny, 5 * tiny, 0}, {0x1.fffffep125f, -0x1.fffffep125f, 1, 0},
      {3.25f, 3.25f, 3.25f},      {1e-38f, 3e-39f, -1e-40f},  {65504, -65504, 65520, 6e-8f},
      {1000, 1000.0001f, 1000.5f}};
  for (const auto& few : inputs) {
    std::vector<float> x(700);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = few[i % few.size()];
    for (const Case& c : {Case{4, 64, false}, {7, 1024, true}, {2, 4096, true}}) {
      const GridCodec codec = c.codec();
      uint32_t refused = 0;
      const Bytes expected = test::encoded(codec, x, kDraws);
      ASSERT_TRUE(same(encodedThere(c, x, DType::float32, 0, refused), expected)) << few[0];
      ASSERT_TRUE(same(decodedThere<float>(c, expected, x.size(), DType::float32, refused),
                       test::decoded(codec, expected, x.size())));
      std::vector<uint16_t> y(x.size());  // overflows to infinity and to subnormal halves
      codec.decode(y.data(), DType::float16, expected, 0, x.size());
      ASSERT_TRUE(same(decodedThere<uint16_t>(c, expected, x.size(), DType::float16, refused), y)) << few[0];
      ASSERT_EQ(refused, 0u);
    }
  }
}

TEST_F(CudaGrid, NonFiniteElementsAreRefused) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (float bad : {nan, -nan, INFINITY, -INFINITY, 0x1p126f, -0x1p126f}) {
    for (uint32_t bucket : {64u, 1024u, 4096u}) {
      for (size_t at : {size_t{0}, size_t{700}, size_t{5000}}) {
        std::vector<float> x = normal(5001, 9);
        x[at] = bad;
        uint32_t refused = 0;
        encodedThere({4, bucket, at == 700}, x, DType::float32, 0, refused);
        ASSERT_EQ(refused, 1u) << bad << " at " << at << ", bucket " << bucket;
      }
    }
  }
  const std::vector<float> all(600, nan);
  uint32_t refused = 0;
  encodedThere({4, 64, false}, all, DType::float32, 0, refused);
  EXPECT_EQ(refused, 1u);
  // The flag is only ever raised.
  encodedThere({4, 64, false}, normal(600, 1), DType::float32, 0, refused);
  EXPECT_EQ(refused, 1u);
}

TEST_F(CudaGrid, PayloadsThatAReaderRefuses) {
  const Case c{3, 64, false};
  const size_t n = 512 + 64 + 17;
  const GridCodec codec = c.codec();
  const Bytes good = test::encoded(codec, normal(n, 2));
  size_t refusals = 0;
  // Every byte of the metadata and its padding set to 0xff with its neighbour, and every bit of the short last block.
  const auto expectAgreement = [&](const Bytes& bytes) {
    bool refuses = false;
    try {
      test::decoded(codec, bytes, n);
    } catch (const WireError&) {
      refuses = true;
    }
    uint32_t refused = 0;
    decodedThere<float>(c, bytes, n, DType::float32, refused);
    ASSERT_EQ(refused != 0, refuses);
    refusals += refuses;
  };
  const size_t words = 128, last = words + 3 * 64;  // 10 buckets: 80 bytes of metadata
  for (size_t i = 0; i + 1 < words; ++i) {
    Bytes bytes = good;
    bytes[i] = bytes[i + 1] = std::byte{0xff};
    ASSERT_NO_FATAL_FAILURE(expectAgreement(bytes)) << "byte " << i;
  }
  for (size_t bit = 0; bit < 8 * (good.size() - last); ++bit) {
    Bytes bytes = good;
    bytes[last + bit / 8] ^= std::byte(1u << (bit % 8));
    ASSERT_NO_FATAL_FAILURE(expectAgreement(bytes)) << "bit " << bit;
  }
  EXPECT_GT(refusals, 48u + 15 * 3);
}

TEST_F(CudaGrid, ElementsPastARunAreLeftAlone) {
  const Case c{4, 64, false};
  const std::vector<float> x = normal(600, 3);
  const Bytes payload = test::encoded(c.codec(), x);
  OnDevice<std::byte> there{std::span<const std::byte>(payload)};
  OnDevice<float> y(1024, 7.0f);
  OnDevice<uint32_t> flag(1, 0);
  cuda::decodeGrid({}, c.run(600), y.data(), there.data(), flag.data());
  const std::vector<float> out = y.host();
  for (size_t i = 600; i < out.size(); ++i)
    ASSERT_EQ(out[i], 7.0f) << i;
}

}  // namespace
}  // namespace lowcomm

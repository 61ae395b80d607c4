// The CUDA kernels against the scalar codec: the same bytes, the same values. Compiled twice: with the simulator's
// <cuda_runtime.h>, and with CUDA's for a device; skipped where that has none.
#include "cuda/grid.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

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

// A codec by its text, and its run here.
struct Case {
  GridCodec codec;

  explicit Case(const std::string& text) : codec(test::gridCodec(text, *scalarKernels())) {}
  cuda::GridRun run(uint64_t count, DType dtype = DType::float32) const { return {codec.spec(), dtype, count}; }
};

// Every codec of every width with every option that it takes, in buckets of `bucket`.
std::vector<std::string> allTexts(uint32_t bucket) {
  std::vector<std::string> texts;
  for (const GridFamily& family : kGridFamilies) {
    if (family.book) continue;  // no kernels for them yet
    for (int bits = family.least_bits; bits <= family.most_bits; ++bits) {
      const std::string name = std::string(family.name) + (family.named() ? std::to_string(bits) : "");
      const std::string text = name + ":bucket=" + std::to_string(bucket);
      texts.push_back(text);
      if (family.bf16()) texts.push_back(text + ",meta=bf16");
      if (family.l2) texts.push_back(text + ",range=l2");
      if (family.l2 && family.bf16()) texts.push_back(text + ",meta=bf16,range=l2");
      if (family.delta) texts.push_back(text + ",delta=32");  // a range of up to 32 at one bit
    }
  }
  return texts;
}

const Draws kDraws{0x123456789abcdef0u, 22, 33};
constexpr PhiloxKey kKey{0x123456789abcdef0u, 22, 33};

// `offset` elements are left out in front, so that x is not aligned to more than its type.
template <class T>
Bytes encodedThere(const Case& c, const std::vector<T>& x, DType dtype, uint64_t block, uint32_t& refused,
                   size_t offset = 0) {
  std::vector<T> shifted(offset);
  shifted.insert(shifted.end(), x.begin(), x.end());
  OnDevice<T> there{std::span<const T>(shifted)};
  OnDevice<std::byte> payload(c.codec.encodedBytes(x.size(), dtype), std::byte{0xff});
  OnDevice<uint32_t> flag(1, refused);
  cuda::encodeGrid({}, c.run(x.size(), dtype), payload.data(), there.data() + offset, block, kKey, flag.data());
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

void expectSame(const std::string& text, const std::vector<float>& x, uint64_t block = 0, size_t offset = 0) {
  const Case c(text);
  const GridCodec& codec = c.codec;
  const size_t n = x.size();
  const std::string name = text + " of " + std::to_string(n);
  uint32_t refused = 0;
  const Bytes expected = test::encoded(codec, x, kDraws, block * 512);
  const Bytes payload = encodedThere(c, x, DType::float32, block, refused, offset);
  ASSERT_TRUE(same(payload, expected)) << name;

  const std::vector<float> y = test::decoded(codec, expected, n);
  ASSERT_TRUE(same(decodedThere<float>(c, expected, n, DType::float32, refused, offset), y)) << name;

  std::vector<float> sum(n);
  for (size_t i = 0; i < n; ++i)
    sum[i] = static_cast<float>(i) / 3;
  OnDevice<float> acc{std::span<const float>(sum)};
  codec.decodeAdd(sum.data(), DType::float32, expected, 0, n);
  OnDevice<std::byte> there{std::span<const std::byte>(expected)};
  OnDevice<uint32_t> flag(1, refused);
  cuda::decodeAddGrid({}, c.run(n), acc.data(), there.data(), flag.data());
  ASSERT_TRUE(same(acc.host(), sum)) << name;
  ASSERT_EQ(flag.host()[0], 0u) << name;
}

std::vector<float> elements(size_t n) {
  return normal(n, static_cast<uint32_t>(n), 3, 0.5f);
}

// Codes are packed alike whatever the codec, and buckets measured alike whatever the width: so each width meets every
// size, each codec every size, and each text some sizes.
TEST_F(CudaGrid, EveryWidthAndSizeEqualsScalar) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (size_t n : test::edgeSizes(64)) {
      ASSERT_NO_FATAL_FAILURE(expectSame("qsgd" + std::to_string(bits) + ":bucket=64", elements(n)));
    }
  }
}

TEST_F(CudaGrid, EveryCodecBucketAndSizeEqualsScalar) {
  for (uint32_t bucket : {64u, 128u, 256u, 512u, 1024u, 2048u}) {
    for (const char* name : {"minmax4", "qsgd3", "dither5", "lattice4", "sym4", "mid3", "sign1", "tern"}) {
      const std::string text = std::string(name) + ":bucket=" + std::to_string(bucket);
      const bool l2 = gridFamily(CodecSpec::parse(text).id)->l2;
      for (size_t n : {size_t{0}, size_t{1}, size_t{63}, size_t{513}, size_t{bucket} - 1, size_t{bucket},
                       size_t{bucket} + 1, size_t{3 * bucket} + 777}) {
        ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(n)));
        if (l2) {
          ASSERT_NO_FATAL_FAILURE(expectSame(text + ",range=l2", elements(n)));
        }
      }
    }
  }
}

TEST_F(CudaGrid, EveryTextEqualsScalar) {
  size_t turn = 0;
  for (uint32_t bucket : {64u, 256u, 1024u, 4096u}) {
    const std::vector<size_t> sizes = {15, 16, 17, 63, 511, 512, 513, bucket + 1, bucket + 777};
    for (const std::string& text : allTexts(bucket)) {
      ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(sizes[turn++ % sizes.size()])));
    }
  }
}

TEST_F(CudaGrid, LargeBuckets) {
  for (const char* name : {"minmax4", "qsgd5", "lattice4", "sym4", "mid3", "sign1", "tern"}) {
    for (uint32_t bucket : {8192u, 65536u}) {
      std::string text = std::string(name) + ":bucket=" + std::to_string(bucket);
      if (gridFamily(CodecSpec::parse(text).id)->l2) text += ",range=l2";
      ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(bucket + 700)));
    }
  }
}

TEST_F(CudaGrid, MoreThanALaunchHoldsAtOnce) {
  for (const char* text : {"qsgd3:bucket=64", "lattice3:bucket=1024", "sign1:bucket=2048", "sym3:bucket=2048",
                           "sym3:bucket=512,range=l2"}) {
    ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(65 * 4 * 1024 + 777)));
  }
}

TEST_F(CudaGrid, BlocksBeyond2To36Elements) {
  for (const char* name : {"qsgd4", "dither4", "lattice4"}) {
    for (uint32_t bucket : {64u, 1024u, 4096u}) {
      for (uint64_t block : {uint64_t{128}, kFarBlock}) {
        const std::string text = std::string(name) + ":bucket=" + std::to_string(bucket);
        ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(bucket + 513), block));
      }
    }
  }
}

TEST_F(CudaGrid, UnalignedElements) {
  for (size_t offset : {1, 2, 3}) {
    for (const char* text :
         {"minmax4:bucket=64", "sign1:bucket=256", "minmax4:bucket=1024", "mid4:bucket=4096,range=l2"}) {
      ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(4999), 0, offset));
    }
  }
}

TEST_F(CudaGrid, SixteenBitElements) {
  for (const char* text :
       {"minmax8:bucket=1024", "qsgd4:bucket=64,meta=bf16", "lattice3:bucket=65536", "qsgd5:bucket=4096",
        "sym8:bucket=256", "mid4:bucket=1024,range=l2,meta=bf16", "sign1:bucket=2048", "tern:bucket=128"}) {
    const Case c(text);
    const GridCodec& codec = c.codec;
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
    for (const char* text :
         {"minmax4:bucket=64", "qsgd7:bucket=1024", "qsgd2:bucket=4096", "lattice4:bucket=128",
          "minmax4:bucket=64,meta=bf16", "sym4:bucket=256", "sym4:bucket=256,range=l2", "mid3:bucket=1024",
          "mid4:bucket=4096,range=l2,meta=bf16", "sign1:bucket=512", "sign1:bucket=64,meta=bf16", "tern:bucket=64"}) {
      const Case c(text);
      const GridCodec& codec = c.codec;
      uint32_t refused = 0;
      const Bytes expected = test::encoded(codec, x, kDraws);
      ASSERT_TRUE(same(encodedThere(c, x, DType::float32, 0, refused), expected)) << few[0] << " " << text;
      ASSERT_TRUE(same(decodedThere<float>(c, expected, x.size(), DType::float32, refused),
                       test::decoded(codec, expected, x.size())));
      std::vector<uint16_t> y(x.size());  // overflows to infinity and to subnormal halves
      codec.decode(y.data(), DType::float16, expected, 0, x.size());
      ASSERT_TRUE(same(decodedThere<uint16_t>(c, expected, x.size(), DType::float16, refused), y))
          << few[0] << " " << text;
      ASSERT_EQ(refused, 0u);
    }
  }
}

const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kBad[] = {0x1p126f, -0x1p126f, INFINITY, -INFINITY};

TEST_F(CudaGrid, NonFiniteElementsAreRefused) {
  for (float bad : {kNan, -kNan, kBad[0], kBad[1], kBad[2], kBad[3]}) {
    for (const char* text : {"minmax4:bucket=64", "qsgd4:bucket=1024", "dither4:bucket=4096", "sym4:bucket=64",
                             "mid4:bucket=1024,range=l2", "sign1:bucket=4096", "tern:bucket=512"}) {
      for (size_t at : {size_t{0}, size_t{700}, size_t{5000}}) {
        std::vector<float> x = normal(5001, 9);
        x[at] = bad;
        uint32_t refused = 0;
        encodedThere(Case(text), x, DType::float32, 0, refused);
        ASSERT_EQ(refused, 1u) << bad << " at " << at << ", " << text;
      }
    }
  }
  const Case c("minmax4:bucket=64");
  uint32_t refused = 0;
  encodedThere(c, std::vector<float>(600, kNan), DType::float32, 0, refused);
  EXPECT_EQ(refused, 1u);
  // The flag is only ever raised.
  encodedThere(c, normal(600, 1), DType::float32, 0, refused);
  EXPECT_EQ(refused, 1u);
}

// The other policies: bytes, values and the sums they give are the host's, those of a bucket without a finite element
// and of one that begins with a NaN too.
TEST_F(CudaGrid, NonFiniteElementsAreMendedAsOnTheHost) {
  std::vector<float> x = normal(6000, 9);
  for (size_t i = 0; i < 6; ++i)
    x[i * 700 + i] = i < 4 ? kBad[i] : kNan;
  std::fill(x.begin() + 5120, x.begin() + 5184, kNan);
  x[5130] = -INFINITY;
  x[5999] = kNan;
  for (const char* policy : {"saturate", "poison"}) {
    for (const char* text : {"minmax4:bucket=64", "qsgd3:bucket=1024", "lattice5:bucket=2048",
                             "minmax8:bucket=128,meta=bf16", "sym4:bucket=64", "mid3:bucket=1024,range=l2",
                             "sym5:bucket=4096,range=l2,meta=bf16", "sign1:bucket=256", "tern:bucket=512"}) {
      const std::string with = std::string(text) + ",nonfinite=" + policy;
      ASSERT_NO_FATAL_FAILURE(expectSame(with, x));
      const Case c(with);
      for (DType dtype : {DType::float16, DType::bfloat16}) {
        std::vector<uint16_t> narrow(x.size()), y(x.size());
        for (size_t i = 0; i < x.size(); ++i)
          narrow[i] = dtype == DType::float16 ? floatToFloat16(x[i]) : floatToBfloat16(x[i]);
        uint32_t refused = 0;
        const Bytes expected = test::encoded(c.codec, narrow, kDraws, 0, dtype);
        ASSERT_TRUE(same(encodedThere(c, narrow, dtype, 0, refused), expected)) << with;
        c.codec.decode(y.data(), dtype, expected, 0, x.size());
        ASSERT_TRUE(same(decodedThere<uint16_t>(c, expected, x.size(), dtype, refused), y)) << with;
        ASSERT_EQ(refused, 0u);
      }
    }
  }
}

TEST_F(CudaGrid, ARangeAboveWhatDeltaSpansIsRefused) {
  for (uint32_t bucket : {64u, 4096u}) {
    std::vector<float> x(5000, 1);
    x[4500] = 4;
    for (const auto& [delta, expected] : {std::pair{"1", 0u}, {"0.9", 1u}}) {
      uint32_t refused = 0;
      encodedThere(Case("lattice2:bucket=" + std::to_string(bucket) + ",delta=" + delta), x, DType::float32, 0,
                   refused);
      EXPECT_EQ(refused, expected) << delta;
    }
  }
}

// What is refused, and how often: the host's codec is asked about every payload.
size_t refusals(const std::string& text, size_t n, size_t words, size_t last) {
  const Case c(text);
  const Bytes good = test::encoded(c.codec, normal(n, 2));
  size_t refusals = 0;
  const auto expectAgreement = [&](const Bytes& bytes, size_t changed) {
    bool refuses = false;
    try {
      test::decoded(c.codec, bytes, n);
    } catch (const WireError&) {
      refuses = true;
    }
    uint32_t refused = 0;
    decodedThere<float>(c, bytes, n, DType::float32, refused);
    EXPECT_EQ(refused != 0, refuses) << text << ": " << changed;
    refusals += refuses;
  };
  // Every byte of the metadata and its padding set to 0xff with its neighbour, and every bit of the short last block.
  for (size_t i = 0; i + 1 < words; ++i) {
    Bytes bytes = good;
    bytes[i] = bytes[i + 1] = std::byte{0xff};
    expectAgreement(bytes, i);
  }
  for (size_t bit = 0; bit < 8 * (good.size() - last); ++bit) {
    Bytes bytes = good;
    bytes[last + bit / 8] ^= std::byte(1u << (bit % 8));
    expectAgreement(bytes, bit);
  }
  return refusals;
}

TEST_F(CudaGrid, PayloadsThatAReaderRefuses) {
  constexpr size_t kCount = 512 + 64 + 17;  // 10 buckets; the last block has 1 element in its sixth row
  EXPECT_GT(refusals("minmax3:bucket=64", kCount, 128, 128 + 3 * 64), 48u + 15 * 3);
  EXPECT_GT(refusals("sym3:bucket=64", kCount, 64, 64 + 3 * 64), 24u + 15 * 3);
  EXPECT_GT(refusals("minmax3:bucket=64,meta=bf16", kCount, 64, 64 + 3 * 64), 24u + 15 * 3);
  EXPECT_GT(refusals("sign1:bucket=64,meta=bf16", kCount, 64, 64 + 64), 44u + 15);
  EXPECT_GT(refusals("tern:bucket=64", kCount, 64, 64 + 2 * 64), 24u + 15 * 2);
}

TEST_F(CudaGrid, PoisonIsRefusedUnderOtherPolicies) {
  std::vector<float> x = normal(600, 2);
  x[70] = kNan;
  for (const char* text : {"minmax4:bucket=64", "sym4:bucket=64", "qsgd4:bucket=64,meta=bf16"}) {
    const Bytes poisoned = test::encoded(Case(text + std::string(",nonfinite=poison")).codec, x);
    uint32_t refused = 0;
    decodedThere<float>(Case(text), poisoned, x.size(), DType::float32, refused);
    EXPECT_EQ(refused, 1u) << text;
  }
}

// Calls of one stream follow each other without the host, on whatever device is named, and leave the caller's device.
TEST_F(CudaGrid, OnAStreamOfEveryDevice) {
  const std::vector<float> x = elements(100000);
  for (int device = 0; device < cuda::deviceCount(); ++device) {
    for (const char* text :
         {"minmax8:bucket=64", "lattice4:bucket=1024", "sign1:bucket=512", "mid4:bucket=4096,range=l2"}) {
      const Case c(text);
      const Bytes expected = test::encoded(c.codec, x, kDraws);
      std::vector<float> twice = test::decoded(c.codec, expected, x.size());
      c.codec.decodeAdd(twice.data(), DType::float32, expected, 0, x.size());

      test::must(cudaSetDevice(device));
      cuda::Place place{device, nullptr};
      test::must(cudaStreamCreateWithFlags(&place.stream, cudaStreamNonBlocking));
      OnDevice<float> there{std::span<const float>(x)}, y(x.size(), 0.0f);
      OnDevice<std::byte> payload(expected.size(), std::byte{0xff});
      OnDevice<uint32_t> flag(1, 0);
      test::must(cudaDeviceSynchronize());
      test::must(cudaSetDevice(0));
      cuda::encodeGrid(place, c.run(x.size()), payload.data(), there.data(), 0, kKey, flag.data());
      cuda::decodeGrid(place, c.run(x.size()), y.data(), payload.data(), flag.data());
      cuda::decodeAddGrid(place, c.run(x.size()), y.data(), payload.data(), flag.data());
      int current = -1;
      test::must(cudaGetDevice(&current));
      EXPECT_EQ(current, 0);
      test::must(cudaStreamSynchronize(place.stream));
      EXPECT_TRUE(same(payload.host(), expected)) << text;
      EXPECT_TRUE(same(y.host(), twice)) << text;
      EXPECT_EQ(flag.host()[0], 0u);
      test::must(cudaStreamDestroy(place.stream));
    }
  }
}

TEST_F(CudaGrid, ElementsPastARunAreLeftAlone) {
  const Case c("minmax4:bucket=64");
  const std::vector<float> x = normal(600, 3);
  const Bytes payload = test::encoded(c.codec, x);
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

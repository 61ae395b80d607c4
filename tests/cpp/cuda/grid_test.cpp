// The CUDA kernels against the scalar codec: the same bytes, the same values.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "cuda/grid_on_device.h"

namespace lowcomm {
namespace {

using namespace test;

using CudaGrid = test::OnCuda;

// Every codec of every width with every option that it takes, in buckets of `bucket`.
std::vector<std::string> allTexts(uint32_t bucket) {
  std::vector<std::string> texts;
  for (const GridFamily& family : kGridFamilies) {
    if (family.book) continue;  // in codebook_test.cpp
    for (int bits = family.least_bits; bits <= family.most_bits; ++bits) {
      const std::string name = std::string(family.name) + std::to_string(bits);
      const std::string text = name + ":bucket=" + std::to_string(bucket);
      texts.push_back(text);
      if (family.bf16()) texts.push_back(text + ",meta=bf16");
      if (family.l2) texts.push_back(text + ",range=l2");
      if (family.l2 && family.bf16()) texts.push_back(text + ",meta=bf16,range=l2");
    }
  }
  return texts;
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
    for (const char* name : {"minmax4", "qsgd3", "lattice4", "sym4", "mid3", "sign1"}) {
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
  for (const char* name : {"minmax4", "qsgd5", "lattice4", "sym4", "mid3", "sign1"}) {
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
  for (const char* name : {"qsgd4", "lattice4"}) {
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
        "sym8:bucket=256", "mid4:bucket=1024,range=l2,meta=bf16", "sign1:bucket=2048"}) {
    const Case c(text);
    for (size_t n : {0, 1, 513, 2048, 5000, 70001}) {
      for (size_t offset : {0, 1}) {
        for (DType dtype : {DType::float16, DType::bfloat16}) {
          // Small enough for subnormal halves among them.
          ASSERT_NO_FATAL_FAILURE(expectSame(c, test::narrowed(normal(n, 5, 1e-4f), dtype), dtype, offset));
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
    const std::vector<float> x = repeated(few);
    for (const char* text :
         {"minmax4:bucket=64", "qsgd7:bucket=1024", "qsgd2:bucket=4096", "lattice4:bucket=128",
          "minmax4:bucket=64,meta=bf16", "sym4:bucket=256", "sym4:bucket=256,range=l2", "mid3:bucket=1024",
          "mid4:bucket=4096,range=l2,meta=bf16", "sign1:bucket=512", "sign1:bucket=64,meta=bf16"}) {
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

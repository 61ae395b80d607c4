// topk on CUDA against the scalar codec: the same bytes, values and refusals.
#include "cuda/grid.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/narrow_float.h"
#include "codec/nonfinite.h"
#include "codec/topk.h"
#include "cuda/on_device.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::normal;
using test::OnDevice;

class CudaTopk : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

constexpr PhiloxKey kKey{0x123456789abcdef0u, 22, 33};
constexpr Draws kDraws{kKey.seed, kKey.stream, kKey.step};

struct Case {
  std::shared_ptr<const Codec> codec;

  explicit Case(const std::string& text) : codec(test::codecOf(text, *scalarKernels())) {}
  cuda::GridRun run(uint64_t count, DType dtype = DType::float32) const { return {codec->spec(), dtype, count}; }
};

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {  // of the bits: -0 is not 0
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
Bytes encodedThere(const Case& c, const std::vector<T>& x, DType dtype, uint32_t& refused, size_t offset = 0) {
  std::vector<T> shifted(offset);
  shifted.insert(shifted.end(), x.begin(), x.end());
  OnDevice<T> there{std::span<const T>(shifted)};
  const cuda::GridRun run = c.run(x.size(), dtype);
  OnDevice<std::byte> payload(c.codec->encodedBytes(x.size(), dtype), std::byte{0xff});
  OnDevice<std::byte> workspace(cuda::topkWorkspaceBytes(run), std::byte{0xff});
  OnDevice<uint32_t> flag(1, refused);
  cuda::encodeTopk({}, run, payload.data(), there.data() + offset, kKey, workspace.data(), flag.data());
  refused = flag.host()[0];
  return payload.host();
}

// `before`: what is in y; added to where T is float and `add`.
template <class T>
std::vector<T> decodedThere(const Case& c, const Bytes& bytes, std::vector<T> before, DType dtype, uint32_t& refused,
                            bool add = false) {
  const cuda::GridRun run = c.run(before.size(), dtype);
  OnDevice<std::byte> payload{std::span<const std::byte>(bytes)};
  OnDevice<std::byte> workspace(cuda::topkWorkspaceBytes(run), std::byte{0xff});
  OnDevice<T> y{std::span<const T>(before)};
  OnDevice<uint32_t> flag(1, refused);
  if (add) {
    cuda::decodeAddTopk({}, run, reinterpret_cast<float*>(y.data()), payload.data(), workspace.data(), flag.data());
  } else {
    cuda::decodeTopk({}, run, y.data(), payload.data(), workspace.data(), flag.data());
  }
  refused = flag.host()[0];
  return y.host();
}

void expectSame(const std::string& text, const std::vector<float>& x, size_t offset = 0) {
  const Case c(text);
  const std::string name = text + " of " + std::to_string(x.size());
  uint32_t refused = 0;
  const Bytes expected = test::encoded(*c.codec, x, kDraws);
  ASSERT_TRUE(same(encodedThere(c, x, DType::float32, refused, offset), expected)) << name;
  ASSERT_TRUE(same(decodedThere(c, expected, std::vector<float>(x.size(), 7.5f), DType::float32, refused),
                   test::decoded(*c.codec, expected, x.size())))
      << name;
  std::vector<float> sum(x.size());
  for (size_t i = 0; i < sum.size(); ++i)
    sum[i] = static_cast<float>(i) / 3;
  const std::vector<float> added = decodedThere(c, expected, sum, DType::float32, refused, /*add=*/true);
  c.codec->decodeAdd(sum.data(), DType::float32, expected, 0, x.size());
  ASSERT_TRUE(same(added, sum)) << name;
  ASSERT_EQ(refused, 0u) << name;
}

// Both forms of the places, of tensors around a word, a row of the bitmap, a warp's share, a chunk and a list's block.
TEST_F(CudaTopk, EveryFormAndSizeEqualsScalar) {
  for (const char* text : {"topk", "topk:keep=0.01,values=qsgd4", "topk:keep=0.5,values=sign1"}) {
    for (size_t n : {0, 1, 2, 3, 7, 31, 32, 33, 513, 1023, 1025, 5000, 8191, 8193})
      ASSERT_NO_FATAL_FAILURE(expectSame(text, normal(n, static_cast<uint32_t>(n))));
  }
  for (size_t n : {65537, 140001})
    ASSERT_NO_FATAL_FAILURE(expectSame("topk:keep=0.001,values=minmax8", normal(n, 1)));
  ASSERT_NO_FATAL_FAILURE(expectSame("topk:keep=0.1,values=mid4", normal(70001, 1)));
}

// Chunks, and places of a list, by turns.
TEST_F(CudaTopk, MoreThanALaunchHoldsAtOnce) {
  for (const char* text : {"topk:keep=0.05,values=sign1", "topk:keep=0.1,values=sign1"})
    ASSERT_NO_FATAL_FAILURE(expectSame(text, normal(64 * 8192 + 777, 1)));
}

TEST_F(CudaTopk, EveryCodecOfValues) {
  for (const char* values : {"minmax3", "qsgd2", "dither5", "lattice6", "sym8", "mid1", "sign1", "tern"}) {
    for (const char* keep : {"0.02", "0.7", "1"})
      ASSERT_NO_FATAL_FAILURE(expectSame("topk:keep=" + std::string(keep) + ",values=" + values, normal(3001, 2)));
  }
}

// Of equal magnitudes the first are sent, wherever they stand: few different ones, one, zeros of both signs.
TEST_F(CudaTopk, Ties) {
  for (size_t n : {100, 9000}) {
    std::vector<float> x = normal(n, 5), zeros(n);
    for (size_t i = 0; i < n; ++i) {
      x[i] = std::round(x[i] * 2) / 2;
      zeros[i] = i % 3 ? 0.0f : -0.0f;
    }
    for (const char* keep : {"0.003", "0.2", "0.45", "0.999"}) {
      const std::string text = "topk:values=minmax4,keep=" + std::string(keep);
      ASSERT_NO_FATAL_FAILURE(expectSame(text, x));
      ASSERT_NO_FATAL_FAILURE(expectSame(text, zeros));
    }
    ASSERT_NO_FATAL_FAILURE(expectSame("topk:keep=0.5", std::vector<float>(n, -3.5f)));
  }
}

// Magnitudes that differ in their last bits only, or in nothing but the exponent, down to the least subnormal.
TEST_F(CudaTopk, SelectsByEveryBit) {
  std::mt19937 generator(1);
  std::vector<float> close(5000), wide(5000), subnormal(5000);
  for (size_t i = 0; i < close.size(); ++i) {
    close[i] = floatOf(0x3f800000u + generator() % 700);
    wide[i] = floatOf(generator() % 0x7e800000u | (generator() & 0x80000000u));
    subnormal[i] = floatOf(generator() % 3000);
  }
  for (const char* keep : {"0.0002", "0.01", "0.5", "0.9998"}) {
    for (const auto& x : {close, wide, subnormal})
      ASSERT_NO_FATAL_FAILURE(expectSame("topk:values=sym8,keep=" + std::string(keep), x));
  }
}

TEST_F(CudaTopk, UnalignedElements) {
  for (size_t offset : {1, 2, 3})
    ASSERT_NO_FATAL_FAILURE(expectSame("topk:keep=0.1", normal(8999, 2), offset));
}

TEST_F(CudaTopk, SixteenBitElements) {
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    for (const char* text : {"topk:keep=0.1,values=sym8", "topk:keep=0.004,nonfinite=poison",
                             "topk:keep=0.004,nonfinite=saturate", "topk:keep=0.0003,nonfinite=saturate"}) {
      for (size_t offset : {0, 1}) {
        const Case c(text);
        std::vector<uint16_t> x(10001), y(x.size());
        const std::vector<float> wide = normal(x.size(), 1, 1e-3f);
        for (size_t i = 0; i < x.size(); ++i)
          x[i] = dtype == DType::float16 ? floatToFloat16(wide[i]) : floatToBfloat16(wide[i]);
        // NaN of many magnitudes, more than are sent by one of the codecs.
        for (size_t i = 0; c.codec->spec().nonfinite != Nonfinite::error && i < 20; ++i)
          x[100 + 400 * i] = static_cast<uint16_t>(0x7f81 + 3 * (i * 7 % 20) + (i % 2 << 15));
        uint32_t refused = 0;
        const Bytes expected = test::encoded(*c.codec, x, kDraws, 0, dtype);
        ASSERT_TRUE(same(encodedThere(c, x, dtype, refused, offset), expected)) << text << " " << dtypeName(dtype);
        c.codec->decode(y.data(), dtype, expected, 0, x.size());
        ASSERT_TRUE(same(decodedThere(c, expected, std::vector<uint16_t>(x.size(), 9), dtype, refused), y)) << text;
        ASSERT_EQ(refused, 0u);
      }
    }
  }
}

TEST_F(CudaTopk, WhatIsNotFinite) {
  for (float bad : {NAN, -INFINITY, 0x1p126f}) {
    std::vector<float> x = normal(5000, 1);
    x[4321] = bad;
    uint32_t refused = 0;
    encodedThere(Case("topk:keep=0.01"), x, DType::float32, refused);
    EXPECT_EQ(refused, 1u) << bad;
    for (const char* values : {"minmax4", "sym8", "sign1"}) {
      for (const char* policy : {"saturate", "poison"}) {
        const std::string text = std::string("topk:keep=0.01,values=") + values + ",nonfinite=" + policy;
        ASSERT_NO_FATAL_FAILURE(expectSame(text, x));
        // More of them than are sent, of many kinds.
        for (size_t i = 0; i < 200; ++i)
          x[3 * i] = floatOf(static_cast<uint32_t>((i % 2 << 31) + 0x7f7ffff0u + i * 31 % 64));
        ASSERT_NO_FATAL_FAILURE(expectSame(text, x));
      }
    }
  }
}

// The host's codec is asked about every payload. Returns how many it refuses.
class ChangedPayload {
 public:
  ChangedPayload(const std::string& text, size_t n) : c_(text), n_(n), good_(test::encoded(*c_.codec, normal(n, 1))) {}

  const Bytes& good() const { return good_; }
  size_t refusals() const { return refusals_; }

  void expectAgreement(const Bytes& bytes, size_t changed) {
    bool refuses = false;
    std::vector<float> y;
    try {
      y = test::decoded(*c_.codec, bytes, n_);
    } catch (const WireError&) {
      refuses = true;
    }
    uint32_t refused = 0;
    const std::vector<float> there = decodedThere(c_, bytes, std::vector<float>(n_, 7.5f), DType::float32, refused);
    ASSERT_EQ(refused != 0, refuses) << c_.codec->spec().str() << ": " << changed;
    if (!refuses) {
      ASSERT_TRUE(same(there, y)) << changed;
    }
    if (changed % 4 == 0) {
      refused = 0;
      decodedThere(c_, bytes, std::vector<float>(n_), DType::float32, refused, /*add=*/true);
      ASSERT_EQ(refused != 0, refuses) << c_.codec->spec().str() << ": " << changed;
    }
    refusals_ += refuses;
  }

 private:
  Case c_;
  size_t n_, refusals_ = 0;
  Bytes good_;
};

TEST_F(CudaTopk, PayloadsThatAReaderRefuses) {
  for (const auto& [text, n] : {std::pair("topk:keep=0.3,values=sym4", 100), {"topk:keep=0.02,values=sym4", 400}}) {
    ChangedPayload payload(text, static_cast<size_t>(n));
    for (size_t bit = 0; bit < 8 * 64; bit += 5) {  // every byte, every bit of one
      Bytes bytes = payload.good();
      bytes[bit / 8] ^= std::byte(1u << (bit % 8));
      ASSERT_NO_FATAL_FAILURE(payload.expectAgreement(bytes, bit));
    }
    EXPECT_GT(payload.refusals(), 80u) << text;
  }
}

// As many places as there should be, one of them past the last element.
TEST_F(CudaTopk, ABitmapWhoseCountAloneIsRight) {
  ChangedPayload payload("topk:keep=0.3,values=sym4", 100);
  Bytes bytes = payload.good();
  size_t sent = 0;
  while ((bytes[16 + sent / 8] >> sent % 8 & std::byte{1}) == std::byte{0})
    ++sent;
  bytes[16 + sent / 8] ^= std::byte(1u << sent % 8);
  bytes[16 + 100 / 8] |= std::byte(1u << 100 % 8);
  ASSERT_NO_FATAL_FAILURE(payload.expectAgreement(bytes, 0));
  EXPECT_EQ(payload.refusals(), 1u);
}

TEST_F(CudaTopk, ListsThatAReaderRefuses) {
  constexpr size_t kCount = 140001;
  ChangedPayload payload("topk:keep=0.0001,values=sym4", kCount);  // 14 places in three blocks
  const auto with = [&](std::vector<uint32_t> counts, std::vector<uint16_t> places) {
    Bytes bytes = payload.good();
    std::memcpy(bytes.data() + 16, counts.data(), 12);
    std::memcpy(bytes.data() + 28, places.data(), 28);
    const size_t before = payload.refusals();
    payload.expectAgreement(bytes, 0);
    return payload.refusals() - before;
  };
  const std::vector<uint16_t> good = {0, 1, 65535, 0, 7, 8, 9, 65535, 0, 1, 2, 3, 4, 8928};
  const auto changed = [&](size_t at, uint16_t to) {
    std::vector<uint16_t> places = good;
    places[at] = to;
    return places;
  };
  EXPECT_EQ(with({3, 5, 6}, good), 0u);
  EXPECT_EQ(with({0, 0, 14}, changed(13, 5)), 1u);
  EXPECT_EQ(with({3, 5, 5}, good), 1u);
  EXPECT_EQ(with({3, 5, 7}, good), 1u);
  EXPECT_EQ(with({4, 4, 6}, good), 1u);
  EXPECT_EQ(with({0xffffffffu, 9, 6}, good), 1u);
  EXPECT_EQ(with({0xfffffffdu, 11, 6}, good), 1u);    // 14 in 32 bits
  EXPECT_EQ(with({3, 5, 6}, changed(13, 8929)), 1u);  // past the last element
  EXPECT_EQ(with({3, 5, 6}, changed(4, 8)), 1u);      // twice
  EXPECT_EQ(with({3, 5, 6}, changed(4, 10)), 1u);     // descending
}

TEST_F(CudaTopk, OnAStreamOfEveryDevice) {
  const std::vector<float> x = normal(50000, 1);
  for (const char* text : {"topk:keep=0.1", "topk:keep=0.01,values=lattice4"}) {
    const Case c(text);
    const Bytes expected = test::encoded(*c.codec, x, kDraws);
    std::vector<float> twice = test::decoded(*c.codec, expected, x.size());
    c.codec->decodeAdd(twice.data(), DType::float32, expected, 0, x.size());
    const cuda::GridRun run = c.run(x.size());
    for (int device = 0; device < cuda::deviceCount(); ++device) {
      test::must(cudaSetDevice(device));
      cuda::Place place{device, nullptr};
      test::must(cudaStreamCreateWithFlags(&place.stream, cudaStreamNonBlocking));
      OnDevice<float> there{std::span<const float>(x)}, y(x.size(), 0.0f);
      OnDevice<std::byte> payload(expected.size(), std::byte{0xff});
      OnDevice<std::byte> workspace(cuda::topkWorkspaceBytes(run), std::byte{0xff});
      OnDevice<uint32_t> flag(1, 0);
      test::must(cudaDeviceSynchronize());
      test::must(cudaSetDevice(0));
      cuda::encodeTopk(place, run, payload.data(), there.data(), kKey, workspace.data(), flag.data());
      cuda::decodeTopk(place, run, y.data(), payload.data(), workspace.data(), flag.data());
      cuda::decodeAddTopk(place, run, y.data(), payload.data(), workspace.data(), flag.data());
      test::must(cudaStreamSynchronize(place.stream));
      EXPECT_TRUE(same(payload.host(), expected)) << text;
      EXPECT_TRUE(same(y.host(), twice)) << text;
      EXPECT_EQ(flag.host()[0], 0u);
      test::must(cudaStreamDestroy(place.stream));
    }
  }
}

template <class Error>
std::string refusal(const CodecSpec& codec, DType dtype, uint64_t count, size_t payload_at = 0,
                    size_t workspace_at = 0) {
  alignas(16) static std::byte bytes[4096];
  uint32_t refused = 0;
  try {
    cuda::decodeTopk({}, {codec, dtype, count}, bytes, bytes + payload_at, bytes + workspace_at, &refused);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(CudaTopkErrors, CallersMistakes) {
  const CodecSpec topk = CodecSpec::parse("topk");
  EXPECT_EQ(refusal<ValueError>(CodecSpec::parse("sym4"), DType::float32, 1),
            "decode topk: codec: expected topk, got sym4:bucket=1024");
  EXPECT_EQ(refusal<TypeError>(topk, DType::float64, 1),
            "decode topk: elements: expected float32, float16 or bfloat16, got float64");
  EXPECT_EQ(refusal<ValueError>(topk, DType::float32, 1, 8),
            "decode topk: payload: expected an address that is a multiple of 16, got 8 more");
  EXPECT_EQ(refusal<ValueError>(topk, DType::float32, 1, 0, 8),
            "decode topk: workspace: expected an address that is a multiple of 16, got 8 more");
  EXPECT_EQ(refusal<ValueError>(topk, DType::float32, (uint64_t{1} << 48) + 1),
            "topk:keep=0.2,values=sym8: expected a tensor of at most 2^48 elements, got 281474976710657");
  CodecSpec none = topk;
  none.keep = 0;
  EXPECT_TRUE(refusal<ValueError>(none, DType::float32, 1).starts_with("decode topk: keep")) << "keep=0";
  EXPECT_EQ(refusal<std::exception>(topk, DType::float32, 0), "no error");
}

}  // namespace
}  // namespace lowcomm

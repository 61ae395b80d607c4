#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/narrow_float.h"
#include "codec/nonfinite.h"
#include "cuda/grid.h"
#include "cuda/on_device.h"
#include "grid_cases.h"

namespace lowcomm::test {

// A codec that is not cut, on the host, and its run here.
struct Uncut {
  std::shared_ptr<const Codec> codec;

  explicit Uncut(const std::string& text) : codec(codecOf(text, *scalarKernels())) {}
  cuda::GridRun run(uint64_t count, DType dtype = DType::float32) const { return {codec->spec(), dtype, count}; }
  std::string name() const { return codec->spec().str(); }
};

// `<name>:<options>` of every family, width and option but axis and bucket; without levels and gauss.
inline std::vector<std::string> uncutTexts() {
  std::vector<std::string> texts;
  for (const GridFamily& family : kGridFamilies) {
    if (family.book) continue;
    for (int bits = family.least_bits; bits <= family.most_bits; ++bits) {
      const std::string name = std::string(family.name) + (family.named() ? std::to_string(bits) : "");
      texts.push_back(name);
      if (family.bf16()) texts.push_back(name + ":meta=bf16");
      if (family.l2) texts.push_back(name + ":range=l2");
      if (family.l2) texts.push_back(name + ":range=l2,meta=bf16");
      if (family.delta) texts.push_back(name + ":delta=128");
    }
  }
  return texts;
}

inline constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(), 0x1p126f, -0x1p126f,
                                 std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()};

inline std::vector<std::vector<float>> unusual() {
  const float tiny = std::numeric_limits<float>::denorm_min();
  return {{-0.0f, 0.0f, -0.0f},       {-0.0f},
          {tiny, -tiny, 5 * tiny, 0}, {0x1.fffffep125f, -0x1.fffffep125f, 1, 0},
          {3.25f, 3.25f, 3.25f},      {1e-38f, 3e-39f, -1e-40f},
          {65504, -65504, 65520},     {-7, -6, -6.5f}};
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {  // of the bits: -0 is not 0
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Skipped where there is no device.
class CudaUncut : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }

  static constexpr PhiloxKey kKey{0x123456789abcdef0u, 22, 33};
  static Draws draws() { return {kKey.seed, kKey.stream, kKey.step}; }

  // `offset` elements are left out in front, so that x is not aligned to more than its type.
  template <class T>
  static Bytes encodedThere(const Uncut& c, const std::vector<T>& x, DType dtype, uint32_t& refused,
                            size_t offset = 0) {
    std::vector<T> shifted(offset);
    shifted.insert(shifted.end(), x.begin(), x.end());
    OnDevice<T> there{std::span<const T>(shifted)};
    OnDevice<std::byte> payload(c.codec->encodedBytes(x.size(), dtype), std::byte{0xff});
    OnDevice<std::byte> workspace(cuda::uncutWorkspaceBytes(c.run(x.size(), dtype)), std::byte{0xff});
    OnDevice<uint32_t> flag(1, refused);
    cuda::encodeUncut({}, c.run(x.size(), dtype), payload.data(), there.data() + offset, kKey, workspace.data(),
                      flag.data());
    refused = flag.host()[0];
    return payload.host();
  }

  template <class T>
  static std::vector<T> decodedThere(const Uncut& c, const Bytes& bytes, size_t count, DType dtype, uint32_t& refused,
                                     size_t offset = 0) {
    OnDevice<std::byte> payload{std::span<const std::byte>(bytes)};
    OnDevice<std::byte> workspace(cuda::uncutWorkspaceBytes(c.run(count, dtype)), std::byte{0xff});
    OnDevice<T> y(count + offset, T{});
    OnDevice<uint32_t> flag(1, refused);
    cuda::decodeUncut({}, c.run(count, dtype), y.data() + offset, payload.data(), workspace.data(), flag.data());
    refused = flag.host()[0];
    const std::vector<T> all = y.host();
    return {all.begin() + static_cast<ptrdiff_t>(offset), all.end()};
  }

  static void expectSame(const Uncut& c, const std::vector<float>& x, size_t offset = 0) {
    const size_t n = x.size();
    const std::string name = c.name() + " of " + std::to_string(n);
    uint32_t refused = 0;
    const Bytes expected = encoded(*c.codec, x, draws());
    ASSERT_TRUE(same(encodedThere(c, x, DType::float32, refused, offset), expected)) << name;
    ASSERT_TRUE(
        same(decodedThere<float>(c, expected, n, DType::float32, refused, offset), decoded(*c.codec, expected, n)))
        << name;
    std::vector<float> sum(n);
    for (size_t i = 0; i < n; ++i)
      sum[i] = static_cast<float>(i) / 3;
    OnDevice<float> acc{std::span<const float>(sum)};
    c.codec->decodeAdd(sum.data(), DType::float32, expected, 0, n);
    OnDevice<std::byte> there{std::span<const std::byte>(expected)};
    OnDevice<std::byte> workspace(cuda::uncutWorkspaceBytes(c.run(n)), std::byte{0xff});
    OnDevice<uint32_t> flag(1, refused);
    cuda::decodeAddUncut({}, c.run(n), acc.data(), there.data(), workspace.data(), flag.data());
    ASSERT_TRUE(same(acc.host(), sum)) << name;
    ASSERT_EQ(flag.host()[0], 0u) << name;
  }

  // The elements as both 16-bit types.
  static void expectSameHalf(const Uncut& c, const std::vector<float>& wide, size_t offset) {
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      std::vector<uint16_t> x(wide.size()), y(wide.size());
      for (size_t i = 0; i < x.size(); ++i)
        x[i] = dtype == DType::float16 ? floatToFloat16(wide[i]) : floatToBfloat16(wide[i]);
      uint32_t refused = 0;
      const Bytes expected = encoded(*c.codec, x, draws(), 0, dtype);
      ASSERT_TRUE(same(encodedThere(c, x, dtype, refused, offset), expected)) << c.name() << " " << dtypeName(dtype);
      c.codec->decode(y.data(), dtype, expected, 0, x.size());
      ASSERT_TRUE(same(decodedThere<uint16_t>(c, expected, x.size(), dtype, refused, offset), y))
          << c.name() << " " << dtypeName(dtype);
      ASSERT_EQ(refused, 0u);
    }
  }

  // The word that an encode leaves.
  static uint32_t refusals(const Uncut& c, const std::vector<float>& x) {
    uint32_t refused = 0;
    encodedThere(c, x, DType::float32, refused);
    return refused;
  }

  // Changes every pair of bytes of the metadata and their padding, and every bit of the short last block; the host's
  // codec is asked about each. Returns how many it refuses.
  static size_t refusedChanges(const Uncut& c, const std::vector<float>& x) {
    const Bytes good = encoded(*c.codec, x);
    const size_t n = x.size(), bits = c.codec->spec().bits;
    const size_t last = good.size() - 64 * ((((n % 512) + 15) / 16 * bits + 31) / 32);
    const size_t words = last - n / 512 * 64 * bits;
    size_t count = 0;
    const auto expectAgreement = [&](const Bytes& bytes, size_t changed) {
      bool refuses = false;
      try {
        decoded(*c.codec, bytes, n);
      } catch (const WireError&) {
        refuses = true;
      }
      uint32_t refused = 0;
      decodedThere<float>(c, bytes, n, DType::float32, refused);
      EXPECT_EQ(refused != 0, refuses) << c.name() << ": " << changed;
      count += refuses;
    };
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
    return count;
  }

  // Calls of one stream follow each other without the host, sharing a workspace.
  static void expectSameOnAStream(const Uncut& c, const std::vector<float>& x) {
    const Bytes expected = encoded(*c.codec, x, draws());
    std::vector<float> twice = decoded(*c.codec, expected, x.size());
    c.codec->decodeAdd(twice.data(), DType::float32, expected, 0, x.size());
    for (int device = 0; device < cuda::deviceCount(); ++device) {
      must(cudaSetDevice(device));
      cuda::Place place{device, nullptr};
      must(cudaStreamCreateWithFlags(&place.stream, cudaStreamNonBlocking));
      const cuda::GridRun run = c.run(x.size());
      OnDevice<float> there{std::span<const float>(x)}, y(x.size(), 0.0f);
      OnDevice<std::byte> payload(expected.size(), std::byte{0xff});
      OnDevice<std::byte> workspace(cuda::uncutWorkspaceBytes(run), std::byte{0xff});
      OnDevice<uint32_t> flag(1, 0);
      must(cudaDeviceSynchronize());
      must(cudaSetDevice(0));
      cuda::encodeUncut(place, run, payload.data(), there.data(), kKey, workspace.data(), flag.data());
      cuda::decodeUncut(place, run, y.data(), payload.data(), workspace.data(), flag.data());
      cuda::decodeAddUncut(place, run, y.data(), payload.data(), workspace.data(), flag.data());
      int current = -1;
      must(cudaGetDevice(&current));
      EXPECT_EQ(current, 0);
      must(cudaStreamSynchronize(place.stream));
      EXPECT_TRUE(same(payload.host(), expected));
      EXPECT_TRUE(same(y.host(), twice));
      EXPECT_EQ(flag.host()[0], 0u);
      must(cudaStreamDestroy(place.stream));
    }
  }
};

// The errors that a caller gets, with or without a device.
template <class Error>
std::string refusal(const std::string& text, uint64_t count, DType dtype = DType::float32, size_t payload_at = 0,
                    size_t workspace_at = 0) {
  alignas(16) static std::byte bytes[4096];
  uint32_t refused = 0;
  try {
    cuda::decodeUncut({}, {CodecSpec::parse(text), dtype, count}, bytes, bytes + payload_at, bytes + workspace_at,
                      &refused);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace lowcomm::test

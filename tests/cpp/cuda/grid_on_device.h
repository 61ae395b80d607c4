#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/narrow_float.h"
#include "codec/level_table.h"
#include "cuda/grid.h"
#include "cuda/on_device.h"
#include "grid_cases.h"
#include "kernels/finite.h"

// Grid codecs on a device next to the scalar codec on the host. A file that includes this is compiled twice: with the
// simulator's <cuda_runtime.h>, and with CUDA's for a device; skipped where that has none.

namespace lowcomm::test {

class OnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

// A codec by its text, of levels with its table, and its run here, which it outlives.
struct Case {
  std::optional<LevelTable> levels;
  GridCodec codec;

  explicit Case(const std::string& text) : codec(gridCodec(text, *scalarKernels())) {}
  Case(const std::string& text, const LevelTable& table)
      : levels(table), codec(CodecSpec::parse(text), *scalarKernels(), table) {}

  cuda::GridRun run(uint64_t count, DType dtype = DType::float32) const {
    return {codec.spec(), dtype, count, levels ? &*levels : nullptr};
  }
};

inline constexpr uint64_t kFarBlock = (uint64_t{1} << 36) / 512 * 5;  // beyond 2^36 elements: the counter's upper half
inline constexpr Draws kDraws{0x123456789abcdef0u, 22, 33};
inline constexpr PhiloxKey kKey{0x123456789abcdef0u, 22, 33};

inline const float kNan = std::numeric_limits<float>::quiet_NaN();

inline std::vector<float> elements(size_t n) {
  return normal(n, static_cast<uint32_t>(n), 3, 0.5f);
}

inline std::vector<float> repeated(const std::vector<float>& few) {
  std::vector<float> x(700);
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = few[i % few.size()];
  return x;
}

inline std::vector<uint16_t> narrowed(const std::vector<float>& x, DType dtype) {
  std::vector<uint16_t> narrow(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    narrow[i] = dtype == DType::float16 ? floatToFloat16(x[i]) : floatToBfloat16(x[i]);
  return narrow;
}

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

// The same of sums that are not finished yet, of whose NaNs it is enough that they are.
inline bool sameSums(std::vector<float> a, std::vector<float> b) {
  settleNans(a.data(), a.size());
  settleNans(b.data(), b.size());
  return same(a, b);
}

inline void expectSame(const Case& c, const std::vector<float>& x, uint64_t block = 0, size_t offset = 0) {
  const GridCodec& codec = c.codec;
  const size_t n = x.size();
  const std::string name = codec.spec().str() + " of " + std::to_string(n);
  uint32_t refused = 0;
  const Bytes expected = encoded(codec, x, kDraws, block * 512);
  const Bytes payload = encodedThere(c, x, DType::float32, block, refused, offset);
  ASSERT_TRUE(same(payload, expected)) << name;

  const std::vector<float> y = decoded(codec, expected, n);
  ASSERT_TRUE(same(decodedThere<float>(c, expected, n, DType::float32, refused, offset), y)) << name;

  std::vector<float> sum(n);
  for (size_t i = 0; i < n; ++i)
    sum[i] = static_cast<float>(i) / 3;
  OnDevice<float> acc{std::span<const float>(sum)};
  codec.decodeAdd(sum.data(), DType::float32, expected, 0, n);
  OnDevice<std::byte> there{std::span<const std::byte>(expected)};
  OnDevice<uint32_t> flag(1, refused);
  cuda::decodeAddGrid({}, c.run(n), acc.data(), there.data(), flag.data());
  ASSERT_TRUE(sameSums(acc.host(), sum)) << name;
  ASSERT_EQ(flag.host()[0], 0u) << name;
}

inline void expectSame(const std::string& text, const std::vector<float>& x, uint64_t block = 0, size_t offset = 0) {
  expectSame(Case(text), x, block, offset);
}

// 16-bit elements, there and back.
inline void expectSame(const Case& c, const std::vector<uint16_t>& x, DType dtype, size_t offset = 0) {
  const std::string name = c.codec.spec().str() + " of " + std::to_string(x.size()) + " " + dtypeName(dtype);
  std::vector<uint16_t> y(x.size());
  uint32_t refused = 0;
  const Bytes expected = encoded(c.codec, x, kDraws, 0, dtype);
  ASSERT_TRUE(same(encodedThere(c, x, dtype, 0, refused, offset), expected)) << name;
  c.codec.decode(y.data(), dtype, expected, 0, x.size());
  ASSERT_TRUE(same(decodedThere<uint16_t>(c, expected, x.size(), dtype, refused, offset), y)) << name;
  ASSERT_EQ(refused, 0u) << name;
}

// The verdict of an encoder on x, whose payload is of no interest.
inline uint32_t refusedThere(const Case& c, const std::vector<float>& x) {
  uint32_t refused = 0;
  encodedThere(c, x, DType::float32, 0, refused);
  return refused;
}

// How many payloads of n elements are refused of those with two neighbours of the first `words` bytes, which are the
// metadata and its padding, set to 0xff, and those with every `stride`-th bit from byte `last` on, the short last
// block's first, changed. The host's codec is asked about each of them.
inline size_t agreedRefusals(const Case& c, size_t n, size_t words, size_t last, size_t stride = 1) {
  const Bytes good = encoded(c.codec, normal(n, 2));
  size_t refusals = 0;
  const auto expectAgreement = [&](const Bytes& bytes, size_t changed) {
    bool refuses = false;
    try {
      decoded(c.codec, bytes, n);
    } catch (const WireError&) {
      refuses = true;
    }
    uint32_t refused = 0;
    decodedThere<float>(c, bytes, n, DType::float32, refused);
    EXPECT_EQ(refused != 0, refuses) << c.codec.spec().str() << ": " << changed;
    refusals += refuses;
  };
  for (size_t i = 0; i + 1 < words; ++i) {
    Bytes bytes = good;
    bytes[i] = bytes[i + 1] = std::byte{0xff};
    expectAgreement(bytes, i);
  }
  for (size_t bit = 0; bit < 8 * (good.size() - last); bit += stride) {
    Bytes bytes = good;
    bytes[last + bit / 8] ^= std::byte(1u << (bit % 8));
    expectAgreement(bytes, bit);
  }
  return refusals;
}

}  // namespace lowcomm::test

#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/narrow_float.h"
#include "codec/codec.h"
#include "cuda/on_device.h"
#include "cuda/plain.h"
#include "grid_cases.h"

namespace lowcomm::test {

inline const Draws kPlainDraws{0x123456789abcdef0u, 22, 33};
inline constexpr PhiloxKey kPlainKey{0x123456789abcdef0u, 22, 33};
inline constexpr DType kElementTypes[] = {DType::float32, DType::float16, DType::bfloat16};

// Values as elements of a type, in bytes.
inline Bytes elementsOf(const std::vector<float>& values, DType dtype) {
  Bytes bytes(values.size() * itemBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = dtype == DType::float16 ? floatToFloat16(values[i]) : floatToBfloat16(values[i]);
    const void* from = dtype == DType::float32 ? static_cast<const void*>(&values[i]) : &half;
    std::memcpy(bytes.data() + i * itemBytes(dtype), from, itemBytes(dtype));
  }
  return bytes;
}

inline Bytes bytesOf(const std::vector<float>& values) {
  Bytes bytes(values.size() * 4);
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The functions of a header of csrc/cuda that codes elements by themselves.
struct PlainCalls {
  void (*encode)(const cuda::Place&, const cuda::PlainRun&, void*, const void*, uint64_t, const PhiloxKey&, uint32_t*);
  void (*decode)(const cuda::Place&, const cuda::PlainRun&, void*, const void*, uint32_t*);
  void (*decode_add)(const cuda::Place&, const cuda::PlainRun&, float*, const void*, uint32_t*);
};

// One codec there and here. Elements on the device lie `offset` of them past an aligned address.
struct PlainCase {
  std::shared_ptr<const Codec> codec;
  PlainCalls calls;

  PlainCase(const std::string& text, const PlainCalls& calls) : codec(codecOf(text, *scalarKernels())), calls(calls) {}

  cuda::PlainRun run(uint64_t count, DType dtype) const { return {codec->spec(), dtype, count}; }

  Bytes encodedHere(const Bytes& x, DType dtype, uint64_t block) const {
    const uint64_t count = x.size() / itemBytes(dtype);
    Bytes payload(codec->encodedBytes(count, dtype), std::byte{0xff});
    codec->encode(payload, x.data(), dtype, block * 512, count, kPlainDraws);
    return payload;
  }

  Bytes encodedThere(const Bytes& x, DType dtype, uint64_t block, uint32_t& refused, size_t offset = 0) const {
    const uint64_t count = x.size() / itemBytes(dtype);
    const size_t skipped = offset * itemBytes(dtype);
    Bytes shifted(skipped);
    shifted.insert(shifted.end(), x.begin(), x.end());
    OnDevice<std::byte> there{std::span<const std::byte>(shifted)};
    OnDevice<std::byte> payload(codec->encodedBytes(count, dtype), std::byte{0xff});
    OnDevice<uint32_t> flag(1, refused);
    calls.encode({}, run(count, dtype), payload.data(), there.data() + skipped, block, kPlainKey, flag.data());
    refused = flag.host()[0];
    return payload.host();
  }

  Bytes decodedHere(const Bytes& payload, DType dtype, uint64_t count) const {
    Bytes y(count * itemBytes(dtype), std::byte{0xff});
    codec->decode(y.data(), dtype, payload, 0, count);
    return y;
  }

  // Twice 64 bytes round the values are left as they were.
  Bytes decodedThere(const Bytes& payload, DType dtype, uint64_t count, uint32_t& refused, size_t offset = 0) const {
    const size_t skipped = 64 + offset * itemBytes(dtype), size = count * itemBytes(dtype);
    OnDevice<std::byte> there{std::span<const std::byte>(payload)};
    OnDevice<std::byte> y(skipped + size + 64, std::byte{0x5a});
    OnDevice<uint32_t> flag(1, refused);
    calls.decode({}, run(count, dtype), y.data() + skipped, there.data(), flag.data());
    refused = flag.host()[0];
    const Bytes all = y.host();
    for (size_t i = 0; i < all.size(); ++i) {
      if (i < skipped || i >= skipped + size) {
        EXPECT_EQ(all[i], std::byte{0x5a}) << i;
      }
    }
    return {all.begin() + static_cast<ptrdiff_t>(skipped), all.begin() + static_cast<ptrdiff_t>(skipped + size)};
  }

  // Bytes, values in every type, and sums are the host's; nothing is refused.
  void expectSame(const std::vector<float>& values, DType dtype, uint64_t block = 0, size_t offset = 0) const {
    SCOPED_TRACE(codec->spec().str() + " of " + std::to_string(values.size()) + " " + dtypeName(dtype) + " + " +
                 std::to_string(offset));
    const uint64_t n = values.size();
    const Bytes x = elementsOf(values, dtype);
    uint32_t refused = 0;
    const Bytes payload = encodedHere(x, dtype, block);
    ASSERT_EQ(encodedThere(x, dtype, block, refused, offset), payload);
    ASSERT_EQ(decodedThere(payload, dtype, n, refused, offset), decodedHere(payload, dtype, n));

    std::vector<float> sum(n);
    for (size_t i = 0; i < n; ++i)
      sum[i] = static_cast<float>(i) / 3;
    std::vector<float> shifted(offset);
    shifted.insert(shifted.end(), sum.begin(), sum.end());
    OnDevice<float> acc{std::span<const float>(shifted)};
    OnDevice<std::byte> there{std::span<const std::byte>(payload)};
    OnDevice<uint32_t> flag(1, refused);
    calls.decode_add({}, run(n, dtype), acc.data() + offset, there.data(), flag.data());
    codec->decodeAdd(sum.data(), dtype, payload, 0, n);
    const std::vector<float> all = acc.host();
    ASSERT_EQ(bytesOf({all.begin() + static_cast<ptrdiff_t>(offset), all.end()}), bytesOf(sum));
    ASSERT_EQ(flag.host()[0], 0u);
  }

  // Whether a reader there refuses, which has to be what the host's does.
  bool refusedThere(const Bytes& payload, DType dtype, uint64_t count, const std::string& of) const {
    bool refuses = false;
    try {
      decodedHere(payload, dtype, count);
    } catch (const WireError&) {
      refuses = true;
    }
    uint32_t refused = 0;
    decodedThere(payload, dtype, count, refused);
    EXPECT_EQ(refused != 0, refuses) << codec->spec().str() << " " << of;
    return refuses;
  }
};

}  // namespace lowcomm::test

// Both sides of a delta: the receiver's memory has the sender's bits, whatever codec, types and places.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "fused_cases.h"

namespace lowcomm {
namespace {

using namespace test;

struct Sides {
  Bytes payload, sender, receiver;  // and the memories afterwards
  Tensor y;
};

// A delta of x against m by both sides, the new memories in places of their own or in m's.
Sides exchange(FusedCodec& fused, const Tensor& x, const Tensor& m, uint64_t first, bool apart) {
  const size_t n = x.floats().size();
  Bytes payload(fused.codec().encodedBytes(n, DType::float32), std::byte{0xff});
  Tensor sender = m, receiver = m, y = x;
  Tensor sender_after = m, receiver_after = m;
  std::fill(sender_after.bytes.begin(), sender_after.bytes.end(), std::byte{0x5a});
  std::fill(receiver_after.bytes.begin(), receiver_after.bytes.end(), std::byte{0xa5});
  fused.encodeDelta(payload, x.elements(), sender.elements(), apart ? sender_after.state() : sender.state(), first, n,
                    kDraws);
  fused.decodeDelta(payload, y.state(), receiver.elements(), apart ? receiver_after.state() : receiver.state(), first,
                    n);
  if (!apart) return {payload, sender.bytes, receiver.bytes, y};
  EXPECT_EQ(sender.bytes, m.bytes) << "the memory before stays";
  EXPECT_EQ(receiver.bytes, m.bytes);
  return {payload, sender_after.bytes, receiver_after.bytes, y};
}

TEST(FusedDelta, BothSidesHaveTheSameMemory) {
  for (const std::string text : kTexts) {
    FusedCodec fused(codecOf(text));
    const Codec& codec = fused.codec();
    size_t turn = 0;
    for (size_t n : {1, 63, 512, 1025, 5000, 3 * 4096 + 17}) {
      for (DType of_x : kTypes) {
        const DType of_m = kTypes[turn++ % 3];
        SCOPED_TRACE(text + " " + std::to_string(n) + " " + dtypeName(of_x) + " " + dtypeName(of_m));
        const Tensor x(normal(n, 1), of_x), m(normal(n, 2, 0.3f), of_m);
        const Sides apart = exchange(fused, x, m, 0, true), inside = exchange(fused, x, m, 0, false);
        ASSERT_EQ(apart.sender, apart.receiver);
        ASSERT_EQ(inside.sender, apart.sender);
        ASSERT_EQ(inside.receiver, apart.sender);
        ASSERT_EQ(inside.payload, apart.payload);
        ASSERT_EQ(inside.y.bytes, apart.y.bytes);
        // y is the sum itself: rounded to its own type, not to the memory's.
        std::vector<float> sum = m.floats();
        codec.decodeAdd(sum.data(), DType::float32, apart.payload, 0, n);
        ASSERT_EQ(apart.y.bytes, Tensor(sum, of_x).bytes);
      }
    }
  }
}

// A channel's scale depends on the whole tensor: the same bits in two passes.
TEST(FusedDelta, OfChannels) {
  for (const char* text : {"sym4:axis=channel", "sym2:axis=channel,meta=bf16", "mid8:axis=channel",
                           "sym3:axis=channel,range=l2", "minmax4:axis=channel"}) {
    for (size_t channels : {1, 40, 768, 1024, 5000}) {
      const std::string whole = std::string(text) + ",C=" + std::to_string(channels);
      FusedCodec fused(codecOf(whole)), plain(std::make_shared<test::Opaque>(codecOf(whole)));
      size_t turn = 0;
      for (size_t rows : {1, 5, 16, 33}) {
        for (DType of_x : kTypes) {
          const DType of_m = kTypes[turn++ % 3];
          const size_t n = rows * channels;
          SCOPED_TRACE(whole + " " + std::to_string(rows) + " " + dtypeName(of_x) + " " + dtypeName(of_m));
          const Tensor x(normal(n, 1), of_x), m(normal(n, 2, 0.3f), of_m);
          const Sides expected = exchange(plain, x, m, 0, true);
          for (bool apart : {true, false}) {
            const Sides got = exchange(fused, x, m, 0, apart);
            ASSERT_EQ(got.payload, expected.payload);
            ASSERT_EQ(got.sender, expected.sender);
            ASSERT_EQ(got.receiver, expected.sender);
            ASSERT_EQ(got.y.bytes, expected.y.bytes);
          }
        }
      }
      Tensor x(normal(5 * channels, 1), DType::float32), m = x;
      x.set(2 * channels, NAN);
      Bytes payload(fused.codec().encodedBytes(5 * channels, DType::float32));
      const auto encode = [&] { fused.encodeDelta(payload, x.elements(), m.state(), 0, 5 * channels, kDraws); };
      EXPECT_EQ(test::refusedElement(encode), 2 * channels) << whole;
    }
  }
}

// Of a codec that lets a NaN through y has it, and no memory keeps it.
TEST(FusedDelta, NoMemoryKeepsANan) {
  for (const char* text : {"minmax4:bucket=64,nonfinite=poison", "logbyte"}) {
    FusedCodec fused(codecOf(text));
    std::vector<float> values = normal(300, 1);
    values[70] = NAN;
    const Tensor m(normal(300, 2), DType::float16);
    for (bool apart : {true, false}) {
      const Sides sides = exchange(fused, Tensor(values, DType::float32), m, 0, apart);
      EXPECT_EQ(sides.sender, sides.receiver) << text;
      Tensor after = m;
      after.bytes = sides.sender;
      for (float value : after.floats())
        ASSERT_TRUE(std::isfinite(value)) << text;
    }
  }
}

TEST(FusedDelta, RefusesOtherTypesAndSpoiltPayloads) {
  FusedCodec fused(codecOf("sym4:bucket=64"));
  const Tensor x(normal(100, 1), DType::float32), m(normal(100, 2), DType::float16);
  Tensor y = x, after = m, other(normal(100, 3), DType::bfloat16);
  Bytes payload(fused.codec().encodedBytes(100, DType::float32));
  EXPECT_THROW(fused.encodeDelta(payload, x.elements(), m.elements(), other.state(), 0, 100, kDraws), TypeError);
  EXPECT_THROW(fused.decodeDelta(payload, y.state(), m.elements(), other.state(), 0, 100), TypeError);
  fused.encodeDelta(payload, x.elements(), m.elements(), after.state(), 0, 100, kDraws);
  Bytes spoilt = payload;
  const float nan = NAN;
  std::memcpy(spoilt.data(), &nan, 4);  // the first bucket's step
  EXPECT_THROW(fused.decodeDelta(spoilt, y.state(), m.elements(), after.state(), 0, 100), WireError);
  const std::span<const std::byte> shorter(payload.data(), payload.size() - 64);
  EXPECT_THROW(fused.decodeDelta(shorter, y.state(), m.elements(), after.state(), 0, 100), WireError);
}

}  // namespace
}  // namespace lowcomm

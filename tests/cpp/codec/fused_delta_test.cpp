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
  Bytes payload, sender, receiver, y;  // the memories are those afterwards
  bool operator==(const Sides&) const = default;
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
  if (!apart) return {payload, sender.bytes, receiver.bytes, y.bytes};
  EXPECT_EQ(sender.bytes, m.bytes) << "the memory before stays";
  EXPECT_EQ(receiver.bytes, m.bytes);
  return {payload, sender_after.bytes, receiver_after.bytes, y.bytes};
}

TEST(FusedDelta, BothSidesHaveTheSameMemory) {
  for (const std::string text : kTexts) {
    FusedCodec fused(codecOf(text));
    const Codec& codec = fused.codec();
    size_t turn = 0;
    for (size_t n : {1, 63, 512, 1025, 5000, 3 * 4096 + 17}) {
      for (DType of_x : kTypes) {
        const DType of_m = kTypes[turn++ / 3 % 3];
        SCOPED_TRACE(text + " " + std::to_string(n) + " " + dtypeName(of_x) + " " + dtypeName(of_m));
        const Tensor x(normal(n, 1), of_x), m(normal(n, 2, 0.3f), of_m);
        const Sides apart = exchange(fused, x, m, 0, true), inside = exchange(fused, x, m, 0, false);
        ASSERT_EQ(apart.sender, apart.receiver);
        ASSERT_TRUE(inside == apart);
        // y is the sum itself: rounded to its own type, not to the memory's.
        std::vector<float> sum = m.floats();
        codec.decodeAdd(sum.data(), DType::float32, apart.payload, 0, n);
        ASSERT_EQ(apart.y, Tensor(sum, of_x).bytes);
      }
    }
  }
}

// Codecs that have loops of their own for deltas (gauss: CodebookLoops::change), units, and channels, whose scales
// depend on the whole tensor: under every kernel form the bits of encode, decode and sums one after the other.
class DeltaLoops : public test::EveryForm {
 protected:
  void expectReference(const std::string& text, const Tensor& x, const Tensor& m) {
    SCOPED_TRACE(text + " of " + std::to_string(x.bytes.size()) + " bytes of " + dtypeName(x.dtype) + " " +
                 dtypeName(m.dtype));
    FusedCodec fused(codecOf(text, *GetParam())), plain(std::make_shared<Opaque>(codecOf(text, *scalarKernels())));
    const Sides expected = exchange(plain, x, m, 0, true);
    for (bool apart : {true, false}) {
      const Sides got = exchange(fused, x, m, 0, apart);
      ASSERT_TRUE(got == expected);
      ASSERT_EQ(got.receiver, got.sender);
    }
  }

  void expectReference(const std::string& text, size_t n) {
    for (DType of_m : kTypes)
      expectReference(text, Tensor(changes(n, 1), DType::float32),
                      Tensor(of_m == DType::float32 ? changes(n, 2) : normal(n, 2), of_m));
  }

 private:
  // Blocks of usual size, and some whose squares the loops leave to others: zeros, and elements that are tiny or large.
  static std::vector<float> changes(size_t n, uint32_t seed) {
    std::vector<float> x = normal(n, seed);
    for (size_t i = 0; i < n; ++i) {
      const size_t kind = i / 512 % 7;
      if (kind == 1) x[i] = 0;
      if (kind == 3) x[i] *= 0x1p-60f;
      if (kind == 4 && i % 29 == 0) x[i] = 0x1p-45f;
      if (kind == 5) x[i] *= 0x1p30f;
    }
    return x;
  }
};

INSTANTIATE_TEST_SUITE_P(Fused, DeltaLoops, testing::ValuesIn(test::allForms()), test::formName);

TEST_P(DeltaLoops, OfGaussOfEveryWidth) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const char* options : {"", ":meta=fp32,gain=1.25", ":bucket=1024"}) {
      for (size_t n : {1, 512, 513, 9 * 512 + 7})
        expectReference("gauss" + std::to_string(bits) + options, n);
    }
  }
}

TEST_P(DeltaLoops, OfUnits) {
  for (const char* text :
       {"gauss2:unit=576", "gauss4:unit=1024", "gauss4:unit=1600", "gauss4:bucket=1024,unit=1600", "gauss8:unit=40",
        "minmax4:bucket=128,unit=960", "sym4:unit=100", "qsgd4:bucket=64,unit=600"}) {
    for (uint64_t units : {1, 5, 8, 43})
      expectReference(text, CodecSpec::parse(text).unit * units);
  }
}

TEST_P(DeltaLoops, OfChannels) {
  for (const char* text : {"sym4:axis=channel", "sym2:axis=channel,meta=bf16", "mid8:axis=channel",
                           "sym3:axis=channel,range=l2", "minmax4:axis=channel"}) {
    size_t turn = 0;
    for (size_t channels : {1, 40, 768, 1024, 5000}) {
      for (size_t rows : {1, 5, 16, 33}) {
        const size_t n = rows * channels;
        for (DType of_x : kTypes)
          expectReference(std::string(text) + ",C=" + std::to_string(channels), Tensor(normal(n, 1), of_x),
                          Tensor(normal(n, 2, 0.3f), kTypes[turn++ / 3 % 3]));
      }
    }
  }
}

// An element that cannot be sent is named, and the memory that is not written in place stays.
TEST_P(DeltaLoops, RefusalsNameTheElement) {
  constexpr size_t kCount = 576 * 4;
  for (const char* text : {"gauss4", "gauss4:unit=576", "sym4:axis=channel,C=64", "minmax4:axis=channel,C=1"}) {
    FusedCodec fused(codecOf(text, *GetParam()));
    Bytes payload(fused.codec().encodedBytes(kCount, DType::float32));
    for (size_t at : {size_t{0}, size_t{570}, size_t{576 * 3 + 9}}) {
      Tensor x(normal(kCount, 1), DType::float32), m(normal(kCount, 2), DType::float32), after = m;
      const Bytes before = m.bytes;
      x.set(at, at > 0 ? NAN : *text == 'g' ? 0x1p121f : 0x1p127f);
      const auto encode = [&] {
        fused.encodeDelta(payload, x.elements(), m.elements(), after.state(), 0, kCount, kDraws);
      };
      EXPECT_EQ(test::refusedElement(encode), at) << text;
      EXPECT_EQ(m.bytes, before);
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

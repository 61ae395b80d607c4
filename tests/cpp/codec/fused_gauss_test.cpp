// Deltas of gauss, which have loops of their own (CodebookLoops::change), and of units: under every kernel form the
// bits of encode, decode and sums one after the other.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "fused_cases.h"

namespace lowcomm {
namespace {

using namespace test;

struct Result {
  Bytes payload, sender, receiver, y;
  bool operator==(const Result&) const = default;
};

Result delta(std::shared_ptr<const Codec> codec, const Tensor& x, const Tensor& m, bool in_place) {
  FusedCodec fused(std::move(codec));
  const size_t n = x.floats().size();
  Bytes payload(fused.codec().encodedBytes(n, DType::float32), std::byte{0xff});
  Tensor before = m, sender = m, receiver = m, y = x;
  const Elements was = in_place ? sender.elements() : before.elements();
  fused.encodeDelta(payload, x.elements(), was, sender.state(), 0, n, kDraws);
  fused.decodeDelta(payload, y.state(), in_place ? receiver.elements() : before.elements(), receiver.state(), 0, n);
  EXPECT_EQ(before.bytes, m.bytes);
  return {payload, sender.bytes, receiver.bytes, y.bytes};
}

// Blocks of usual size, and some whose squares the loops leave to others: zeros, and elements that are tiny or large.
std::vector<float> changes(size_t n, uint32_t seed) {
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

class GaussDeltas : public test::EveryForm {
 protected:
  void expectReference(const std::string& text, size_t n) {
    for (DType of_m : kTypes) {
      SCOPED_TRACE(text + " " + std::to_string(n) + " " + dtypeName(of_m));
      const std::vector<float> small = changes(n, 1), memory = of_m == DType::float32 ? changes(n, 2) : normal(n, 2);
      const Tensor x(small, DType::float32), m(memory, of_m);
      const auto plain = std::make_shared<test::Opaque>(codecOf(text, *scalarKernels()));
      for (bool in_place : {false, true}) {
        const Result got = delta(codecOf(text, *GetParam()), x, m, in_place);
        ASSERT_EQ(got, delta(plain, x, m, in_place));
        ASSERT_EQ(got.sender, got.receiver);
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Fused, GaussDeltas, testing::ValuesIn(test::allForms()), test::formName);

TEST_P(GaussDeltas, OfEveryWidth) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const char* options : {"", ":meta=fp32,gain=1.25", ":bucket=1024"}) {
      for (size_t n : {1, 512, 513, 9 * 512 + 7})
        expectReference("gauss" + std::to_string(bits) + options, n);
    }
  }
}

TEST_P(GaussDeltas, OfUnits) {
  for (const char* text :
       {"gauss2:unit=576", "gauss4:unit=1024", "gauss4:unit=1600", "gauss4:bucket=1024,unit=1600", "gauss8:unit=40",
        "minmax4:bucket=128,unit=960", "sym4:unit=100", "qsgd4:bucket=64,unit=600"}) {
    const uint64_t unit = CodecSpec::parse(text).unit;
    for (uint64_t units : {1, 5, 8, 43})
      expectReference(text, unit * units);
  }
}

// A NaN in one element is named, and the memory that is not written in place stays.
TEST_P(GaussDeltas, RefusalsNameTheElement) {
  for (const char* text : {"gauss4", "gauss4:unit=576"}) {
    Tensor x(normal(576 * 4, 1), DType::float32);
    const Tensor m(normal(576 * 4, 2), DType::float32);
    for (size_t at : {size_t{0}, size_t{570}, size_t{576 * 3 + 9}}) {
      Tensor spoilt = x, after = m, before = m;
      spoilt.set(at, at == 0 ? 0x1p121f : NAN);
      FusedCodec fused(codecOf(text, *GetParam()));
      Bytes payload(fused.codec().encodedBytes(576 * 4, DType::float32));
      const auto encode = [&] {
        fused.encodeDelta(payload, spoilt.elements(), before.elements(), after.state(), 0, 576 * 4, kDraws);
      };
      EXPECT_EQ(test::refusedElement(encode), at) << text;
      EXPECT_EQ(before.bytes, m.bytes);
    }
  }
}

}  // namespace
}  // namespace lowcomm

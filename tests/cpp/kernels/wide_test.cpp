// The grid loops at AVX-512's 16 lanes.
#include <gtest/gtest.h>

#include <cstring>

#include "grid_cases.h"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"
#include "sixteen_lanes.inl"
//
#include "kernels/grid/grid_vector.inl"

namespace lowcomm {
namespace {

// Where a form's loops stop, every buffer holds this.
constexpr std::byte kUntouched{0xa5};

struct EncodedBytes {
  bool taken;
  test::Bytes meta, words;
};

EncodedBytes run(KernelTable::EncodeGrid encode, const std::vector<float>& x, const GridForm& form, uint64_t block) {
  const size_t size = 8 * (x.size() / form.bucket + 1) + 64 * (x.size() / 64 + 9);
  EncodedBytes out{false, test::Bytes(size, kUntouched), test::Bytes(size, kUntouched)};
  out.taken = encode(out.meta.data(), out.words.data(), x.data(), x.size(), form, block, {0x123456789abcdefull, 7, 9});
  return out;
}

std::vector<float> run(KernelTable::DecodeGrid decode, std::vector<float> y, const EncodedBytes& from,
                       const GridForm& form) {
  decode(y.data(), from.meta.data(), from.words.data(), y.size(), form);
  return y;
}

template <int kBits, GridRule kRule>
void expectScalars(GridForm form) {
  constexpr bool kCentred = aroundZero(kRule);
  constexpr float kTop = (1 << kBits) - 1;
  if (kCentred) {  // sym's grid, or sign1's
    form.divisor = kRule == GridRule::sign ? 1 : kTop / 2;
    form.numerator = kTop / 2;
    form.low = -kTop / 2;
    form.high = kTop / 2;
    form.magic = 256.5f + kTop / 2;
    form.centre = kTop / 2;
  }
  const KernelTable& scalar = *scalarKernels();
  constexpr GridValue kValue = kCentred ? GridValue::centred : GridValue::affine;
  const KernelTable::DecodeGrid wide[] = {decodeGrid<kBits, false, kValue>, decodeGrid<kBits, true, kValue>};
  for (size_t n : test::edgeSizes(form.bucket)) {
    if (n == 0) continue;
    const std::vector<float> x = test::normal(n, static_cast<uint32_t>(n), 3, 0.5f);
    for (uint64_t block : {uint64_t{0}, uint64_t{1} << 27}) {  // from where counter word 1 is not 0, too
      const EncodedBytes expected = run(scalar.encode_grid[kBits - 1][static_cast<int>(kRule)], x, form, block);
      const EncodedBytes got = run(encodeGrid<kBits, kRule>, x, form, block);
      const std::string where = "bits " + std::to_string(kBits) + " rule " + std::to_string(static_cast<int>(kRule)) +
                                " bucket " + std::to_string(form.bucket) + " of " + std::to_string(n);
      ASSERT_TRUE(expected.taken && got.taken) << where;
      ASSERT_EQ(expected.meta, got.meta) << where;
      ASSERT_EQ(expected.words, got.words) << where;
      for (int add = 0; add < 2; ++add) {
        const auto* decode = kCentred ? scalar.decode_centred[kBits - 1] : scalar.decode_grid[kBits - 1];
        const std::vector<float> y = run(decode[add], x, got, form), z = run(wide[add], x, got, form);
        ASSERT_EQ(std::memcmp(y.data(), z.data(), n * sizeof(float)), 0) << where << " add " << add;
      }
    }
  }
}

// One width inside a word, two across words, and the widest.
template <GridRule kRule>
void expectScalarsAtWidths(const GridForm& form) {
  if constexpr (kRule == GridRule::sign) {
    expectScalars<1, kRule>(form);
  } else {
    expectScalars<3, kRule>(form);
    expectScalars<4, kRule>(form);
    expectScalars<8, kRule>(form);
  }
}

TEST(SixteenLanes, GiveTheBytesAndValuesOfScalar) {
  for (uint32_t bucket : {64, 128, 512, 1024, 4096}) {
    for (bool bf16 : {false, true}) {
      GridForm form;
      form.bucket = bucket;
      form.bf16 = bf16;
      expectScalarsAtWidths<GridRule::nearest>(form);
      expectScalarsAtWidths<GridRule::stochastic>(form);
      expectScalarsAtWidths<GridRule::centred>(form);
      expectScalarsAtWidths<GridRule::sign>(form);
      expectScalarsAtWidths<GridRule::dithered>(form);
    }
  }
}

}  // namespace
}  // namespace lowcomm

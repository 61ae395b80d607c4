// The loops of the casts at 16 lanes.
#include <cstring>

#include "kernels/cast/cast.h"
#include "kernels/isa/table.h"
#include "sixteen_lanes.inl"
//
#include "kernels/cast/cast_vector.inl"
#include "wide_cases.h"

LOWCOMM_CAST_FORM(wide)

namespace lowcomm {
namespace {

KernelTable wideTable() {
  KernelTable table = *scalarKernels();
  table.casts = &wide::kCasts;
  table.float16_to_float = wide::halvesToFloats;
  table.float_to_float16 = wide::floatsToHalves;
  table.bfloat16_to_float = wide::brainsToFloats;
  table.float_to_bfloat16 = wide::floatsToBrains;
  return table;
}

TEST(SixteenLanes, CastAsScalar) {
  const KernelTable table = wideTable();
  for (const char* text : {"fp16", "bf16"})
    test::expectScalars(text, table, test::kWideSizes);
}

// Every code of both types, NaN and infinities among them, and what becomes of its value.
TEST(SixteenLanes, ConvertAsScalar) {
  const KernelTable table = wideTable(), &scalar = *scalarKernels();
  std::vector<uint16_t> codes(65536 + 5), narrow(codes.size()), expected(codes.size());
  for (size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<uint16_t>(i);
  for (auto of : {&KernelTable::float16_to_float, &KernelTable::bfloat16_to_float}) {
    std::vector<float> y(codes.size()), z(codes.size());
    (table.*of)(y.data(), codes.data(), codes.size());
    (scalar.*of)(z.data(), codes.data(), codes.size());
    ASSERT_EQ(std::memcmp(y.data(), z.data(), y.size() * sizeof(float)), 0);
    for (auto to : {&KernelTable::float_to_float16, &KernelTable::float_to_bfloat16}) {
      (table.*to)(narrow.data(), z.data(), z.size());
      (scalar.*to)(expected.data(), z.data(), z.size());
      ASSERT_EQ(narrow, expected);
    }
  }
}

TEST(SixteenLanes, CopyAsScalar) {
  for (size_t n : test::kWideSizes) {
    std::vector<uint16_t> codes(n, 0x1234), copied(n);
    auto *to = reinterpret_cast<Code16*>(copied.data()), *from = reinterpret_cast<Code16*>(codes.data());
    EXPECT_TRUE(wide::kCasts.copy(to, from, n, 0x7c00));
    EXPECT_EQ(copied, codes);
    if (n == 0) continue;
    codes[n / 2] = 0xfc00;
    EXPECT_FALSE(wide::kCasts.copy(to, from, n, 0x7c00));
  }
}

}  // namespace
}  // namespace lowcomm

// The loops of codebooks, and the rotation, at 16 lanes.
#include "kernels/codebook/codebook.h"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"
#include "kernels/isa/table.h"
#include "sixteen_lanes.inl"
#include "wide_cases.h"

#include "kernels/codebook/codebook_vector.inl"

namespace lowcomm {
namespace {

const RotationLoops kRotation = LOWCOMM_ROTATION_LOOPS;

constexpr CodebookLoops kCodebooks = LOWCOMM_CODEBOOK_LOOPS;

TEST(SixteenLanes, CodebooksAsScalar) {
  KernelTable table = *scalarKernels();
  table.codebooks = &kCodebooks;
  for (int bits = 1; bits <= 8; ++bits) {
    const std::string levels = "levels" + std::to_string(bits), gauss = "gauss" + std::to_string(bits);
    for (const std::string& text :
         {levels + ":bucket=64", levels + ":bucket=512,meta=bf16", gauss, gauss + ":bucket=1024,meta=fp32,gain=1.5"})
      test::expectScalars(text, table, test::kWideSizes);
  }
}

TEST(SixteenLanes, RotateAsScalar) {
  KernelTable table = *scalarKernels();
  table.rotation = &kRotation;
  for (const char* text : {"gauss4", "minmax3:bucket=512,rotate=1", "qsgd8:bucket=1024,rotate=1"})
    test::expectScalars(text, table, test::kWideSizes);
  // Of parts of units, with every number of rows that are rotated together.
  for (const char* text : {"gauss4:unit=1008", "sym4:rotate=1,unit=1008"})
    test::expectScalars(text, table, {1008, 7 * 1008, 33 * 1008});
  // A refused value, wherever it is in a block.
  for (size_t at : {0, 15, 16, 511, 512, 700}) {
    std::vector<float> x = test::normal(701, 1), y(1024);
    EXPECT_TRUE(rotate<32>(y.data(), x.data(), x.size(), {}));
    x[at] = -0x1p120f;
    EXPECT_FALSE(rotate<32>(y.data(), x.data(), x.size(), {})) << at;
  }
}

}  // namespace
}  // namespace lowcomm

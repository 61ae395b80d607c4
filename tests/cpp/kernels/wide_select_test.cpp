// The selection of largest magnitudes at 16 lanes.
#include "kernels/select/select.h"

#include <cmath>

#include "kernels/isa/table.h"
#include "sixteen_lanes.inl"
//
#include "kernels/select/select_vector.inl"
#include "wide_cases.h"

namespace lowcomm {
namespace {

const SelectKernels kSelect = {count, gather, mark, largest};

TEST(SixteenLanes, SelectAsScalar) {
  KernelTable table = *scalarKernels();
  table.select = &kSelect;
  for (const char* text :
       {"topk", "topk:keep=0.003", "topk:keep=0.5,values=minmax3", "topk:keep=1", "topk:chunk=1024,keep=16"})
    test::expectScalars(text, table, test::kWideSizes);
}

// Equal magnitudes: only the first of them are among the largest.
TEST(SixteenLanes, SelectAsScalarAmongTies) {
  std::vector<float> x = test::normal(3000, 1);
  for (float& v : x)
    v = std::round(v);
  for (size_t k : {1, 40, 1000, 2999, 3000}) {
    std::vector<uint64_t> bitmap(47), expected(47);
    std::vector<float> values(k + kSlack), all(k + kSlack);
    selectLargest(bitmap.data(), values.data(), x.data(), x.size(), k, kSelect);
    selectLargest(expected.data(), all.data(), x.data(), x.size(), k, *scalarKernels()->select);
    EXPECT_EQ(bitmap, expected) << k;
    EXPECT_EQ(std::memcmp(values.data(), all.data(), k * sizeof(float)), 0) << k;
  }
}

}  // namespace
}  // namespace lowcomm

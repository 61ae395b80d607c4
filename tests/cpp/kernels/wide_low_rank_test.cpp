// The loops of low-rank products at 16 lanes.
#include "sixteen_lanes.inl"
//
#include "kernels/low_rank/low_rank.h"
#include "kernels/low_rank/low_rank_vector.inl"
#include "low_rank_cases.h"

LOWCOMM_LOW_RANK_FORM(wide)

namespace lowcomm {
namespace {

TEST(SixteenLanes, MultiplyAsScalar) {
  test::expectScalarsProducts(wide::kLowRank, "16 lanes");
}

}  // namespace
}  // namespace lowcomm

// The loops of low-rank products at 16 lanes.
#include "sixteen_lanes.inl"
//
#include "kernels/low_rank.h"
#include "kernels/low_rank_vector.inl"
#include "low_rank_cases.h"

namespace lowcomm {
namespace {

TEST(SixteenLanes, MultiplyAsScalar) {
  test::expectScalarsProducts(kLowRank, "16 lanes");
}

}  // namespace
}  // namespace lowcomm

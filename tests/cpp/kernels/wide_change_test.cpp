// The loops of deltas at 16 lanes.
#include "kernels/cast/cast.h"
#include "kernels/isa/table.h"
#include "sixteen_lanes.inl"
//
#include "kernels/change/change_vector.inl"
//
#include "change_cases.h"

LOWCOMM_CHANGE_FORM(sixteen)

namespace lowcomm {
namespace {

TEST(SixteenLanes, ChangesAsScalar) {
  test::expectScalarChanges(sixteen::kChanges);
}

TEST(SixteenLanes, ChangesStopAtARefusal) {
  test::expectRefusals(sixteen::kChanges);
}

}  // namespace
}  // namespace lowcomm

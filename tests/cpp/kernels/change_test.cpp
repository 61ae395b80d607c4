// The loops of deltas, of every form that this machine runs.
#include "kernels/change/change.h"

#include "change_cases.h"

namespace lowcomm {
namespace {

TEST(Changes, AsScalar) {
  for (const KernelTable* form : test::allForms()) {
    SCOPED_TRACE(form->name);
    test::expectScalarChanges(*form->changes);
  }
}

TEST(Changes, RefusalsStopAtTheirGroup) {
  for (const KernelTable* form : test::allForms()) {
    SCOPED_TRACE(form->name);
    test::expectRefusals(*form->changes);
  }
}

}  // namespace
}  // namespace lowcomm

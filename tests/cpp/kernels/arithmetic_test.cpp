// Sums and differences of every form are those of single floats.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "grid_cases.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

TEST(Arithmetic, EveryFormAddsAndSubtractsAlike) {
  size_t forms = 0;
  const KernelTable* const* form = kernelForms(&forms);
  for (size_t f = 0; f < forms; ++f) {
    for (size_t n : {0, 1, 7, 8, 15, 16, 17, 1000}) {
      SCOPED_TRACE(std::string(form[f]->name) + " " + std::to_string(n));
      const std::vector<float> a = test::normal(n, 1), b = test::normal(n, 2, 1e-3f);
      std::vector<float> sum(n + 1, 5), difference = b;  // in place, and with one element that is nobody's
      form[f]->sum(sum.data(), a.data(), b.data(), n);
      form[f]->difference(difference.data(), a.data(), difference.data(), n);
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(sum[i], a[i] + b[i]) << i;
        ASSERT_EQ(difference[i], a[i] - b[i]) << i;
      }
      ASSERT_EQ(sum[n], 5);
    }
  }
}

}  // namespace
}  // namespace lowcomm

// The loops of perturbations at 16 lanes.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/noise/noise.h"
#include "kernels/noise/noise_rules.h"
#include "sixteen_lanes.inl"

namespace lowcomm {
namespace {

LOWCOMM_LANES Floats squareRoot(Floats x) {
  for (int i = 0; i < kLanes; ++i)
    x[i] = std::sqrt(x[i]);
  return x;
}

struct SumTable {
  const float* sums;
};

LOWCOMM_LANES SumTable sumTable(const float* sums) {
  return {sums};
}

LOWCOMM_LANES Floats lookUp(const SumTable& table, Words index) {
  return lookUp<4>(table.sums, index);
}

}  // namespace
}  // namespace lowcomm

#include "kernels/noise/noise_vector.inl"
#include "wide_cases.h"

LOWCOMM_NOISE_FORM(wide)

namespace lowcomm {
namespace {

TEST(SixteenLanes, PerturbAsScalar) {
  for (auto add : {&NoiseKernels::gaussian, &NoiseKernels::rademacher}) {
    for (size_t terms : {1, 2, 3, 4, 5, 9}) {
      std::vector<NoiseTerm> list;
      for (size_t k = 0; k < terms; ++k)
        list.push_back({{noiseSeed(1, k, 2, 3), 3, 0}, 0.37f / static_cast<float>(k + 1)});
      for (uint64_t first : {uint64_t{0}, uint64_t{63}, uint64_t{2048}, (uint64_t{1} << 39) - 5}) {
        for (size_t n : {1, 17, 64, 2047, 2048, 2049, 6500}) {
          const std::vector<float> x = test::normal(n, static_cast<uint32_t>(n));
          for (const float* to : {static_cast<const float*>(nullptr), x.data()}) {
            std::vector<float> y(n), z(n);
            (wide::kNoise.*add)(y.data(), to, first, n, list.data(), terms);
            (scalar::kNoise.*add)(z.data(), to, first, n, list.data(), terms);
            ASSERT_EQ(std::memcmp(y.data(), z.data(), n * sizeof(float)), 0)
                << terms << " terms, " << n << " elements from " << first;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm

#include "cuda/noise.h"

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/isa/table.h"
#include "kernels/noise/noise.h"
#include "rows.h"

namespace lowcomm {

void measureNoise(std::vector<Row>& rows, Noise noise, size_t terms, double bound, const Options& options) {
  size_t forms = 0;
  const KernelTable* const* form = kernelForms(&forms);
  const size_t count = (options.mib << 20) / 4, checked = std::min<size_t>(count, 1 << 20);
  std::vector<NoiseTerm> of(terms);
  for (size_t i = 0; i < terms; ++i)
    of[i] = {{noiseSeed(1, 2, 3, i), 4, 0}, 0.1f * static_cast<float>(i + 1)};
  std::vector<float> expected(checked);
  addNoise(*form[forms - 1], noise, expected.data(), expected.data(), DType::float32, 0, checked, of);

  const Memory x(count * 4), there(terms * sizeof(NoiseTerm)), from(count * 8), to(count * 8);
  must(cudaMemcpy(there.get(), of.data(), terms * sizeof(NoiseTerm), cudaMemcpyDefault));
  const auto add = [&] {
    cuda::addNoise({}, noise, x.get(), x.get(), DType::float32, 0, count, static_cast<const NoiseTerm*>(there.get()),
                   terms, of[0].key.stream);
  };
  add();
  const auto* bytes = reinterpret_cast<const std::byte*>(expected.data());
  const bool same = onHost(x, checked * 4) == std::vector<std::byte>(bytes, bytes + checked * 4);
  const char* name = noise == Noise::gaussian ? "gaussian" : "rademacher";
  rows.push_back({std::string(name) + ", seeds " + std::to_string(terms), "float32", "add",
                  measure(count * 8, options.repetitions, from, to, add), bound, same});
}

}  // namespace lowcomm

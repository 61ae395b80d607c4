#include "kernels/low_rank.h"

#include <string_view>

namespace lowcomm {

const LowRankKernels& lowRankKernels(const KernelTable& form) {
  // By name: a form's functions, the one that returns its table too, are compiled for instructions that this machine
  // may lack.
  const std::string_view name = form.name;
  if (name == "avx512") return *avx512LowRank();
  if (name == "avx2") return *avx2LowRank();
  if (name == "neon") return *neonLowRank();
  return *scalarLowRank();
}

}  // namespace lowcomm

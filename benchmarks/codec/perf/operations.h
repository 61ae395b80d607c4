#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/isa/table.h"
#include "timing.h"

namespace lowcomm {

// Operations that are fused with codecs, perturbations, and checksums.
struct Operation {
  std::string form, name;
  double rate;   // elements x 4 bytes / time, GB/s
  double ratio;  // of what `against` says
  std::string against;
  double target;  // the least ratio; 0: none
};

// Measures every operation whose name holds options.only, and calls `done` with each.
std::vector<Operation> measureOperations(const Options& options, const std::vector<const KernelTable*>& forms,
                                         const std::function<void(const Operation&)>& done);

}  // namespace lowcomm

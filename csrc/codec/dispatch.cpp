#include "codec/dispatch.h"

#include <cstddef>
#include <cstdlib>
#include <string>

#include "base/error.h"

namespace lowcomm {

const KernelTable& chooseKernels(const char* requested) {
  size_t count = 0;
  const KernelTable* const* forms = kernelForms(&count);
  if (requested == nullptr || *requested == '\0') return *forms[count - 1];
  if (const KernelTable* found = findKernels(requested)) return *found;
  std::string have;
  for (size_t i = 0; i < count; ++i)
    have += (i ? " or " : "") + std::string(forms[i]->name);
  throw ValueError("LOWCOMM_KERNELS: expected " + have + " (what this build and this machine have), got '" +
                   std::string(requested) + "'");
}

const KernelTable& kernels() {
  static const KernelTable& chosen = chooseKernels(std::getenv("LOWCOMM_KERNELS"));
  return chosen;
}

const char* kernelsName() {
  return kernels().name;
}

}  // namespace lowcomm

#include "kernels/isa/table.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"

// CMake says which forms are compiled: LOWCOMM_HAS_<FORM>.

namespace lowcomm {

namespace {

#if LOWCOMM_HAS_AVX2
bool machineHasAvx2() {
#if defined(__clang__)  // does not know f16c here; every processor with AVX2 has it
  return __builtin_cpu_supports("avx2");
#else
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif
}
#endif

#if LOWCOMM_HAS_AVX512
// __builtin_cpu_supports asks CPUID and, by XGETBV, whether the system saves the wide registers.
bool machineHasAvx512() {
  return machineHasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

struct Forms {
  const KernelTable* list[4] = {};
  size_t count = 0;

  Forms() {
    list[count++] = &scalar::kTable;
#if LOWCOMM_HAS_AVX2
    if (machineHasAvx2()) list[count++] = &avx2::kTable;
#endif
#if LOWCOMM_HAS_AVX512
    if (machineHasAvx512()) list[count++] = &avx512::kTable;
#endif
#if LOWCOMM_HAS_NEON
    list[count++] = &neon::kTable;
#endif
  }
};

const Forms& forms() {
  static const Forms kForms;
  return kForms;
}

}  // namespace

const KernelTable* scalarKernels() {
  return &scalar::kTable;
}

const KernelTable* const* kernelForms(size_t* count) {
  *count = forms().count;
  return forms().list;
}

const KernelTable* findKernels(const char* name) {
  for (size_t i = 0; i < forms().count; ++i) {
    if (std::strcmp(forms().list[i]->name, name) == 0) return forms().list[i];
  }
  return nullptr;
}

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

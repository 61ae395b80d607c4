#include "kernels/table.h"

#include <cstring>

namespace lowcomm {

namespace {

bool machineHasAvx2() {
#if !defined(__x86_64__) && !defined(__i386__)
  return false;
#elif defined(__clang__)  // does not know f16c here; every processor with AVX2 has it
  return __builtin_cpu_supports("avx2");
#else
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif
}

// __builtin_cpu_supports asks CPUID and, by XGETBV, whether the system saves the wide registers.
bool machineHasAvx512() {
#if defined(__x86_64__) || defined(__i386__)
  return machineHasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

struct Forms {
  const KernelTable* list[4] = {};
  size_t count = 0;

  Forms() {
    list[count++] = scalarKernels();
    // Asked first: avx2Kernels() lives in code compiled for AVX2, which this machine may not even enter.
    if (machineHasAvx2() && avx2Kernels()) list[count++] = avx2Kernels();
    if (machineHasAvx512() && avx512Kernels()) list[count++] = avx512Kernels();
    if (neonKernels()) list[count++] = neonKernels();
  }
};

const Forms& forms() {
  static const Forms kForms;
  return kForms;
}

}  // namespace

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

}  // namespace lowcomm

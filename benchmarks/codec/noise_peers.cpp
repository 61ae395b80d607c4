// The functions that noise_peers.py times: perturbations on raw memory, in a library without torch.
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/isa/table.h"
#include "kernels/noise/noise.h"

extern "C" {

// y += factor·z for one seed; `gaussian` 0 means Rademacher.
__attribute__((visibility("default"))) void add_noise(float* y, size_t count, uint64_t seed, float factor,
                                                      int gaussian) {
  using namespace lowcomm;
  const NoiseTerm term{{seed, 0, 0}, factor};
  addNoise(kernels(), gaussian ? Noise::gaussian : Noise::rademacher, y, y, DType::float32, 0, count, {&term, 1});
}

__attribute__((visibility("default"))) const char* kernels_name() {
  return lowcomm::kernelsName();
}
}

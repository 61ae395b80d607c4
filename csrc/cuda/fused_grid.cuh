#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "codec/family.h"
#include "cuda/grid.h"
#include "cuda/grid_args.cuh"

namespace lowcomm::cuda {

// gridArgs for a fused operation. Throws ValueError, besides what gridArgs throws, for a codec with a rotation or a
// codebook.
inline GridArgs<std::byte> fusedGrid(const char* doing, const GridRun& run, void* payload, uint32_t* refused) {
  const GridArgs<std::byte> grid = gridArgs(doing, run, static_cast<std::byte*>(payload), refused);
  if (grid.rotated || gridFamily(run.codec.id)->book) {
    throw ValueError(std::string(doing) + ": codec: expected a grid codec without rotation and codebook, got " +
                     run.codec.str());
  }
  return grid;
}

}  // namespace lowcomm::cuda

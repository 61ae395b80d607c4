#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "base/narrow_float.h"
#include "codec/family.h"
#include "cuda/fused_args.cuh"
#include "cuda/grid.h"
#include "cuda/grid_args.cuh"
#include "cuda/launch.cuh"
#include "kernels/finite.h"

namespace lowcomm::cuda {

namespace {

// gridArgs for a fused operation. Throws ValueError, in addition to what gridArgs throws, for a codec with a rotation
// or a codebook.
GridArgs<std::byte> fusedGrid(const char* doing, const GridRun& run, void* payload, uint32_t* refused) {
  const GridArgs<std::byte> grid = gridArgs(doing, run, static_cast<std::byte*>(payload), refused);
  if (grid.rotated || gridFamily(run.codec.id)->book) {
    throw ValueError(std::string(doing) + ": codec: expected a grid codec without rotation and codebook, got " +
                     run.codec.str());
  }
  return grid;
}

template <Change kChange>
void encodeWithState(const Place& place, const char* doing, const GridRun& run, void* payload, const void* x,
                     const FusedState& state, uint64_t block, const PhiloxKey& key, uint32_t* refused) {
  const GridArgs<std::byte> grid = fusedGrid(doing, run, payload, refused);
  expectState(doing, state);
  if (run.count > 0) encodeChange<kChange>(place, doing, grid, run, x, state, block, key);
}

}  // namespace

void expectState(const char* doing, const FusedState& state) {
  if (isCoded(state.dtype)) return;
  throw TypeError(std::string(doing) + ": state: expected float32, float16 or bfloat16, got " + dtypeName(state.dtype));
}

void encodeDelta(const Place& place, const GridRun& run, void* payload, const void* x, const FusedState& m,
                 uint64_t block, const PhiloxKey& key, uint32_t* refused) {
  encodeWithState<Change::delta>(place, "encode delta", run, payload, x, m, block, key, refused);
}

void encodeFeedback(const Place& place, const GridRun& run, void* payload, const void* g, const FusedState& e,
                    uint64_t block, const PhiloxKey& key, uint32_t* refused) {
  encodeWithState<Change::feedback>(place, "encode feedback", run, payload, g, e, block, key, refused);
}

void encodeSum(const Place& place, const GridRun& run, void* payload, void* out, std::span<const FusedTerm> terms,
               uint32_t average_over, uint64_t block, const PhiloxKey& key, uint32_t* refused) {
  constexpr const char* kWhat = "encode sum";
  const GridArgs<std::byte> grid = fusedGrid(kWhat, run, payload, refused);
  if (terms.empty() || terms.size() > kMostTerms) {
    throw ValueError(std::string(kWhat) + ": terms: expected 1..." + std::to_string(kMostTerms) + ", got " +
                     std::to_string(terms.size()));
  }
  SumTerms sum{};
  sum.count = static_cast<uint32_t>(terms.size());
  sum.average_over = average_over;
  sum.pad = static_cast<size_t>(grid.pad - grid.meta);
  sum.words = static_cast<size_t>(grid.words - grid.meta);
  sum.own = run.dtype;
  for (size_t k = 0; k < terms.size(); ++k) {
    sum.term[k] = terms[k];
    if (terms[k].payload == nullptr && terms[k].own == nullptr) {
      throw ValueError(std::string(kWhat) + ": term " + std::to_string(k) +
                       ": expected a payload or elements, got none");
    }
    if (terms[k].own == nullptr) {
      expectAligned(kWhat, ("payload of term " + std::to_string(k)).c_str(), terms[k].payload);
    }
  }
  if (run.count == 0) return;
  const GridFamily& family = *gridFamily(run.codec.id);
  const auto as = family.centred ? encodeSumAs<true> : encodeSumAs<false>;
  as(place, kWhat, gridRule(family), grid, sum, out, block, key);
}

}  // namespace lowcomm::cuda

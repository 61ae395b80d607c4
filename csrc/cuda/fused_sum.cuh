#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/fused.cuh"
#include "cuda/fused_elements.cuh"
#include "cuda/fused_sum_args.cuh"
#include "cuda/fused_sum_source.cuh"
#include "cuda/grid_check.cuh"

namespace lowcomm::cuda {

namespace {

template <bool kCentred>
struct SumOp {
  using Source = SumSource<kCentred>;

  SumTerms terms;
  GridArgs<std::byte> grid;
  AnyState out;

  __device__ Source source(uint64_t at) const { return {&terms, &grid, at}; }

  // False where the padding after a payload's metadata is not 0.
  __device__ bool begins() const {
    bool padded = true;
    for (uint32_t k = 0; k < terms.count; ++k)
      padded &= terms.term[k].own != nullptr || isPadded(source(0).termArgs(k));
    return padded;
  }

  __device__ void finish(uint64_t start, uint32_t n, const Tile& values, bool sendable, Nonfinite,
                         const Seat& seat) const {
    if (!sendable) return;
    Tile tile = values;
    tile.each([](float& x) { x = settled(x); });
    storeTile(out, start, n, tile, seat);
  }
};

}  // namespace

template <bool kCentred>
void encodeSumAs(const Place& place, const char* doing, GridRule rule, const GridArgs<std::byte>& grid,
                 const SumTerms& terms, void* out, uint64_t block, const PhiloxKey& key) {
  const FusedArgs<SumOp<kCentred>> args{grid, {terms, grid, {out, terms.own}}, block, key};
  if constexpr (kCentred) {
    return rule == GridRule::sign ? fusedAs<GridRule::sign>(place, doing, args)
                                  : fusedAs<GridRule::centred>(place, doing, args);
  } else {
    return rule == GridRule::nearest      ? fusedAs<GridRule::nearest>(place, doing, args)
           : rule == GridRule::stochastic ? fusedAs<GridRule::stochastic>(place, doing, args)
                                          : fusedAs<GridRule::dithered>(place, doing, args);
  }
}

}  // namespace lowcomm::cuda

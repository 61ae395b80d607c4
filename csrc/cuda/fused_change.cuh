#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/fused.cuh"
#include "cuda/fused_args.cuh"

// encodeDelta and encodeFeedback: the elements less a state, or added to it, are encoded.

namespace lowcomm::cuda {

// The elements from number `at` on: x - state or x + state.
template <Change kChange>
struct ChangeSource {
  AnyElements x, state;
  uint64_t at;

  __device__ ChangeSource operator+(uint64_t further) const { return {x, state, at + further}; }
};

template <Change kChange>
struct EncodeArgs<ChangeSource<kChange>> {
  GridArgs<std::byte> grid;
  ChangeSource<kChange> x;
  uint64_t block;
  PhiloxKey key;
};

template <Change kChange>
__device__ inline Tile loadTile(const ChangeSource<kChange>& from, uint32_t n, uint32_t bucket, const Seat& seat) {
  Tile tile = loadTile(from.x, from.at, n, bucket, seat);
  const Tile state = loadTile(from.state, from.at, n, bucket, seat);
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) {
    float& y = tile.at[i / 4][i % 4];
    y = kChange == Change::delta ? y - state.at[i / 4][i % 4] : y + state.at[i / 4][i % 4];
  }
  return tile;
}

namespace {

template <Change kChange>
struct ChangeOp {
  using Source = ChangeSource<kChange>;

  AnyElements x, before;
  AnyState after;

  __device__ Source source(uint64_t at) const { return {x, before, at}; }
  __device__ bool begins() const { return true; }

  // Loads once more what it needs, from a cache: until here the registers are the encoder's, which may have mended the
  // elements besides.
  __device__ void finish(uint64_t start, uint32_t n, const Tile& values, bool sendable, Nonfinite nonfinite,
                         const Seat& seat) const {
    constexpr bool kDelta = kChange == Change::delta;
    Tile tile = kDelta ? loadTile(before, start, n, kBlock, seat) : loadTile(source(start), n, kBlock, seat);
    __syncwarp();  // a short block is loaded by threads that do not store it
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      float& was = tile.at[i / 4][i % 4];
      const float value = values.at[i / 4][i % 4], is = kDelta ? was + value : was - value;
      const bool keep = nonfinite != Nonfinite::error && !isFinite(is);
      was = keep ? (kDelta ? was : 0) : is;
    }
    if (sendable) keepTile(after, start, n, tile, seat);
  }
};

}  // namespace

template <Change kChange>
void encodeChange(const Place& place, const char* doing, const GridArgs<std::byte>& grid, const GridRun& run,
                  const void* x, const FusedState& state, uint64_t block, const PhiloxKey& key) {
  const ChangeOp<kChange> op{{x, run.dtype}, {state.before, state.dtype}, {state.after, state.dtype}};
  const FusedArgs<ChangeOp<kChange>> args{grid, op, block, key};
  switch (gridRule(*gridFamily(run.codec.id))) {
    case GridRule::nearest:
      return fusedAs<GridRule::nearest>(place, doing, args);
    case GridRule::stochastic:
      return fusedAs<GridRule::stochastic>(place, doing, args);
    case GridRule::dithered:
      return fusedAs<GridRule::dithered>(place, doing, args);
    case GridRule::centred:
      return fusedAs<GridRule::centred>(place, doing, args);
    default:
      return fusedAs<GridRule::sign>(place, doing, args);
  }
}

}  // namespace lowcomm::cuda

#define LOWCOMM_FUSED_CHANGE(change)                                                                                \
  namespace lowcomm::cuda {                                                                                         \
  template void encodeChange<Change::change>(const Place&, const char*, const GridArgs<std::byte>&, const GridRun&, \
                                             const void*, const FusedState&, uint64_t, const PhiloxKey&);           \
  }

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "codec/element.h"
#include "cuda/fused.cuh"
#include "cuda/fused.h"
#include "cuda/fused_elements.cuh"
#include "cuda/fused_grid.cuh"

// encodeDelta and encodeFeedback: elements are encoded less, or with, a state of one's own. A file each instantiates
// them (fused_<op>.cu), so that they compile beside each other.

namespace lowcomm::cuda {

enum class Change : uint8_t { delta, feedback };

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

template <Change kChange>
void encodeChange(const Place& place, const char* doing, const GridRun& run, void* payload, const void* x,
                  const FusedState& state, uint64_t block, const PhiloxKey& key, uint32_t* refused) {
  const GridArgs<std::byte> grid = fusedGrid(doing, run, payload, refused);
  if (!isCoded(state.dtype)) {
    throw TypeError(std::string(doing) + ": state: expected float32, float16 or bfloat16, got " +
                    dtypeName(state.dtype));
  }
  if (run.count == 0) return;
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

}  // namespace

}  // namespace lowcomm::cuda

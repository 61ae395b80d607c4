#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/fused.cuh"
#include "cuda/fused_args.cuh"
#include "cuda/pack.cuh"
#include "cuda/repair.cuh"
#include "cuda/tile.cuh"

// encodeSum: the sum of payloads and elements is encoded.

namespace lowcomm::cuda {

// The sum's elements from number `at` on.
template <bool kCentred>
struct SumSource {
  const SumTerms* terms;
  const GridArgs<std::byte>* grid;  // of the payload that is made; those of the terms have its form
  uint64_t at;

  __device__ SumSource operator+(uint64_t further) const { return {terms, grid, at + further}; }

  __device__ GridArgs<const std::byte> termArgs(uint32_t number) const {
    const auto* payload = static_cast<const std::byte*>(terms->term[number].payload);
    return {payload,          payload + terms->pad, payload + terms->words, grid->count,       grid->codes,
            grid->pad_halves, grid->bits,           grid->bucket_log2,      grid->form,        grid->limit,
            grid->nonfinite,  grid->rotated,        grid->of_units,         grid->three_codes, grid->refused};
  }
};

template <bool kCentred>
struct EncodeArgs<SumSource<kCentred>> {
  GridArgs<std::byte> grid;
  SumSource<kCentred> x;
  uint64_t block;
  PhiloxKey key;
};

namespace {

// The values of a payload's block, as decodeGrid makes them; past the end those of code 0.
template <bool kCentred>
__device__ inline Tile decodeTile(const GridArgs<const std::byte>& grid, uint64_t start, uint32_t n, const Seat& seat) {
  const uint64_t mine = start + seat.group * kSmallestBucket;
  BucketMeta sent{};
  if (mine < grid.count) sent = loadSent<kCentred>(grid, mine >> grid.bucket_log2);
  uint32_t field[4];
  loadFields(field, grid.words + start / 8 * grid.bits, n, grid.bits, seat);
  const bool poisoned = grid.nonfinite == Nonfinite::poison && isPoison<kCentred>(sent);
  const bool finite = poisoned || (isFinite(sent.base) && isFinite(sent.step));
  if (!finite || !areCodes<false>(field, n, grid, seat)) *grid.refused = 1;  // all who write, write 1
  return valuesOf<kCentred>(field, sent, grid.bits, grid.form);
}

}  // namespace

template <bool kCentred>
__device__ inline Tile loadTile(const SumSource<kCentred>& from, uint32_t n, uint32_t bucket, const Seat& seat) {
  const SumTerms& terms = *from.terms;
  Tile sum;
  for (uint32_t k = 0; k < terms.count; ++k) {
    const void* own = terms.term[k].own;
    const Tile term = own == nullptr ? decodeTile<kCentred>(from.termArgs(k), from.at, n, seat)
                                     : loadTile(AnyElements{own, terms.own}, from.at, n, bucket, seat);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      float& so_far = sum.at[i / 4][i % 4];
      so_far = k == 0 ? term.at[i / 4][i % 4] : so_far + term.at[i / 4][i % 4];
    }
  }
  if (terms.average_over > 0) {
    const float divisor = static_cast<float>(terms.average_over);
    sum.each([&](float& x) { x = x / divisor; });
  }
  if (n < kBlock) {  // elements that are not there are like the first of their bucket, which loadTile promises
    const uint32_t first = (seat.group * kSmallestBucket) & ~(bucket - 1);
    const float other = __shfl_sync(kWholeWarp, sum.at[0][0], first / kSmallestBucket * 4);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      if (seat.element(i / 4) + i % 4 >= n) sum.at[i / 4][i % 4] = first < n ? other : 0.0f;
    }
  }
  return sum;
}

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

#define LOWCOMM_FUSED_SUM(centred)                                                                                     \
  namespace lowcomm::cuda {                                                                                            \
  template void encodeSumAs<centred>(const Place&, const char*, GridRule, const GridArgs<std::byte>&, const SumTerms&, \
                                     void*, uint64_t, const PhiloxKey&);                                               \
  }

// The loops of grid.cpp on the vectors of lanes.inl, compiled once an instruction set.
//
// Shape of the encode: groups of 1024 elements (4 KiB; a bucket where that is larger) are read for their statistics and
// then quantized from the first-level cache. Codes never leave the vector lanes: the planar packing puts element e's
// code in lane e mod 16.
//
// Memory is kept busy by prefetches from the quantizing loop, a line a row: a group's statistics take a third of its
// time, and what they asked for in one burst would stand in line there while memory waits for the rest of it.

#include <cstddef>
#include <cstdint>

#include "kernels/codebook/codebook.h"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"
#include "kernels/isa/table.h"
//
#include "kernels/isa/lanes.inl"

namespace lowcomm {
namespace {

constexpr size_t kGroup = 1024;
constexpr size_t kBlock = 512;
constexpr int kMaxBuckets = 16;  // of 64 elements in a group
// Elements ahead: what an encode will read, what a decode will write. Measured on Sapphire Rapids, where 512 comes too
// late for both and 2048 costs an encode a sixth of its speed.
constexpr size_t kPrefetch = kLanes == 16 ? 768 : 1536;
constexpr size_t kPrefetchWritten = 768;

// A function that runs once a group is not worth a copy in each of a hundred loops.
#define LOWCOMM_ONCE static __attribute__((noinline))

}  // namespace
}  // namespace lowcomm

#include "kernels/grid/grid_ranges.inl"

#include "kernels/grid/grid_centred.inl"

#include "kernels/codebook/codebook.inl"

#include "kernels/grid/grid_encode.inl"

#include "kernels/grid/grid_decode.inl"

namespace lowcomm {
namespace {

// A sum or a difference.
template <bool kMinus>
void combine(float* out, const float* a, const float* b, size_t count) {
  const size_t whole = count / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes)
    store(out + i, kMinus ? load(a + i) - load(b + i) : load(a + i) + load(b + i));
  for (size_t i = whole; i < count; ++i)
    out[i] = kMinus ? a[i] - b[i] : a[i] + b[i];
}

// A KernelTable's grid loops, in its order.
#define LOWCOMM_ENCODE(b)                                                                                    \
  {encodeGrid<b, GridRule::nearest>, encodeGrid<b, GridRule::stochastic>, encodeGrid<b, GridRule::dithered>, \
   encodeGrid<b, GridRule::centred>, b == 1 ? encodeGrid<1, GridRule::sign> : nullptr}
#define LOWCOMM_DECODE_AS(b, value) {decodeGrid<b, false, GridValue::value>, decodeGrid<b, true, GridValue::value>}
#define LOWCOMM_DECODE(b) LOWCOMM_DECODE_AS(b, affine)
#define LOWCOMM_DECODE_CENTRED(b) LOWCOMM_DECODE_AS(b, centred)
#define LOWCOMM_EACH_WIDTH(loops) {loops(1), loops(2), loops(3), loops(4), loops(5), loops(6), loops(7), loops(8)}
#define LOWCOMM_GRID_LOOPS \
  LOWCOMM_EACH_WIDTH(LOWCOMM_ENCODE), LOWCOMM_EACH_WIDTH(LOWCOMM_DECODE), LOWCOMM_EACH_WIDTH(LOWCOMM_DECODE_CENTRED)

// A CodebookLoops'.
#define LOWCOMM_ENCODE_BY_BOOK(b) {encodeGrid<b, GridRule::levels>, encodeGrid<b, GridRule::gauss>}
#define LOWCOMM_DECODE_BY_BOOK(b) {LOWCOMM_DECODE_AS(b, levels), LOWCOMM_DECODE_AS(b, gauss)}
#define LOWCOMM_CHANGE(b) changeGauss<b>
#define LOWCOMM_ADVANCE(b) advanceGauss<b>
#define LOWCOMM_CODEBOOK_LOOPS                                                             \
  {LOWCOMM_EACH_WIDTH(LOWCOMM_ENCODE_BY_BOOK), LOWCOMM_EACH_WIDTH(LOWCOMM_DECODE_BY_BOOK), \
   LOWCOMM_EACH_WIDTH(LOWCOMM_CHANGE), LOWCOMM_EACH_WIDTH(LOWCOMM_ADVANCE)}

}  // namespace
}  // namespace lowcomm

// A form's table, with what the other kinds' translation units define.
#define LOWCOMM_GRID_FORM(form)                                                                                       \
  namespace lowcomm::form {                                                                                           \
  constexpr KernelTable kTable = {#form,          LOWCOMM_GRID_LOOPS, &kCodebooks,    &kRotation,     halvesToFloats, \
                                  floatsToHalves, brainsToFloats,     floatsToBrains, combine<false>, combine<true>,  \
                                  &kCasts,        &kSelect,           &kNoise,        &kLowRank};                     \
  }

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codebook/codebook.h"
#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

namespace lowcomm {

struct CastKernels;     // kernels/cast/cast.h
struct SelectKernels;   // kernels/select/select.h
struct NoiseKernels;    // kernels/noise/noise.h
struct LowRankKernels;  // kernels/low_rank/low_rank.h

// The hot loops of one instruction set. Every form gives the same bytes and the same values; only speed differs.
// Pointers need only the alignment of their element type (std::byte*: none). No function allocates or throws. All are
// called under FloatEnv.
//
// encode_grid[b - 1][rule]: writes base and step of ceil(count / bucket) buckets to meta (two little-endian floats
// each, or bfloat16 numbers where form.bf16; centred and sign: the step alone) and the codes of count elements to words
// (planar, FORMAT.md "Payload"), both from the start of a bucket and of a block; `block` is the number of that block in
// the whole tensor. Returns false when an element is not finite or is kFiniteLimit or more in magnitude
// (kernels/finite.h says where): meta and words are then without meaning.
//
// decode_grid[b - 1][add]: y[i] = base + step * code, or y[i] += that. Reads exactly what encode_grid wrote.
// decode_centred[b - 1][add]: the same for what centred and sign wrote, y[i] = (code - form.centre) * step.
struct KernelTable {
  using EncodeGrid = bool (*)(std::byte* meta, std::byte* words, const float* x, size_t count, const GridForm& form,
                              uint64_t block, const PhiloxKey& key);
  using DecodeGrid = void (*)(float* y, const std::byte* meta, const std::byte* words, size_t count,
                              const GridForm& form);

  const char* name;
  EncodeGrid encode_grid[8][kGridRules];  // null: sign at more than 1 bit
  DecodeGrid decode_grid[8][2];
  DecodeGrid decode_centred[8][2];

  const CodebookLoops* codebooks;
  const RotationLoops* rotation;

  void (*float16_to_float)(float* y, const uint16_t* x, size_t count);
  void (*float_to_float16)(uint16_t* y, const float* x, size_t count);
  void (*bfloat16_to_float)(float* y, const uint16_t* x, size_t count);
  void (*float_to_bfloat16)(uint16_t* y, const float* x, size_t count);

  // out[i] = a[i] + b[i], out[i] = a[i] - b[i]; out may be either.
  void (*sum)(float* out, const float* a, const float* b, size_t count);
  void (*difference)(float* out, const float* a, const float* b, size_t count);

  const CastKernels* casts;
  const SelectKernels* select;
  const NoiseKernels* noise;
  const LowRankKernels* low_rank;
};

// The forms of this build that this machine runs, slowest first; scalar, the reference, is always there. `count` is set
// to their number.
const KernelTable* const* kernelForms(size_t* count);

// The form of that name, or null when this build has none or this machine cannot run it.
const KernelTable* findKernels(const char* name);

// The loops this process uses: the fastest form this machine runs, or the one that the environment variable
// LOWCOMM_KERNELS names (scalar, avx2, avx512, neon). Read once. Throws ValueError for an unknown name, or one that
// this build or machine lacks: a benchmark that asked for one form must not measure another.
const KernelTable& kernels();

// Its name, for `info` and the benchmarks.
const char* kernelsName();

// The choice behind kernels(): `requested` null or empty means the fastest. Throws as kernels().
const KernelTable& chooseKernels(const char* requested);

// The parts of a form's table. The scalar loops, the reference, are in <kind>.cpp of each folder. Those of an
// instruction set are in <kind>_vector.inl, and CMake makes a translation unit a kind of loop and instruction set of
// them (isa/form.cpp.in), so that each compiles without the others. Forms that the build's target lacks are not
// defined.
#define LOWCOMM_FORM(form)                                        \
  namespace form {                                                \
  extern const KernelTable kTable;                                \
  extern const CodebookLoops kCodebooks;                          \
  extern const RotationLoops kRotation;                           \
  void halvesToFloats(float* y, const uint16_t* x, size_t count); \
  void floatsToHalves(uint16_t* y, const float* x, size_t count); \
  void brainsToFloats(float* y, const uint16_t* x, size_t count); \
  void floatsToBrains(uint16_t* y, const float* x, size_t count); \
  extern const CastKernels kCasts;                                \
  extern const SelectKernels kSelect;                             \
  extern const NoiseKernels kNoise;                               \
  extern const LowRankKernels kLowRank;                           \
  }
LOWCOMM_FORM(scalar)
LOWCOMM_FORM(avx2)
LOWCOMM_FORM(avx512)
LOWCOMM_FORM(neon)
#undef LOWCOMM_FORM

// The reference.
const KernelTable* scalarKernels();

}  // namespace lowcomm

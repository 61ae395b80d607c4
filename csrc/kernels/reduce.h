#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace lowcomm {

enum class ReduceKind : uint8_t { sum, product, min, max, bit_and, bit_or, bit_xor };

const char* reduceName(ReduceKind kind);

// Whether the exact reductions below take this pair. Bits of floating types and arithmetic of bool are refused.
bool reduceSupports(DType dtype, ReduceKind kind);

// Whether either of the first two terms may come first: the bits are the same, of NaNs once they are settled.
bool reduceCommutes(ReduceKind kind);

// The type that a reduction of `dtype` is accumulated in: fp32 for the 16-bit floats, the type itself otherwise.
DType accumulatorType(DType dtype);

// acc = x, converted to accumulatorType(dtype). n elements; acc and x may be the same memory when the types are.
void reduceAssign(void* acc, const void* x, DType dtype, uint64_t n);

// acc = acc op x, x converted first.
void reduceInto(void* acc, const void* x, DType dtype, ReduceKind kind, uint64_t n);

// out = acc rounded to `dtype`; with average_over > 0, out = that divided by it (truncating for integers). The division
// comes after the rounding, as in gloo, so that two ranks agree with it bit for bit. A NaN becomes the quiet one
// without sign and payload (kPoison for float32), whatever NaN `acc` holds: with codecs, ranks may be of different
// hardware.
void reduceFinish(void* out, const void* acc, DType dtype, uint64_t n, int average_over);

// reduceInto and reduceFinish in one pass, which leaves `acc` as it is unless it is `out`.
void reduceLast(void* out, const void* acc, const void* x, DType dtype, ReduceKind kind, uint64_t n, int average_over);

// out = x * factor in `dtype` (float16 and bfloat16 by way of fp32, rounded once). Floating types only.
void scale(void* out, const void* x, DType dtype, double factor, uint64_t n);

}  // namespace lowcomm

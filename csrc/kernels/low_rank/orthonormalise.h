#pragma once

#include <cstddef>
#include <cstdint>

namespace lowcomm {

// A column that keeps less than this share of its length when the earlier ones are taken out of it depends on them.
inline constexpr double kDependent = 1e-6;

// Orthonormalises `count` vectors of `length` elements, one after another in memory, in place: modified Gram-Schmidt in
// fp64, by ascending number, each rounded to fp32 once at its end. The order of every sum is fixed (8 partial sums,
// element i in number i mod 8, then s[l] += s[l + h] for h = 4, 2, 1), so equal input gives equal bits on every CPU. A
// vector that is zero or depends on those before it (kDependent) becomes zero: a direction that adds nothing. Finite
// input. Returns how many did. Allocates count·length doubles; called under FloatEnv.
size_t orthonormalise(float* x, size_t count, size_t length);

// The same, for a basis that must stay whole: a vector that would become zero is drawn anew first, from ±1 by `seed`
// and its number, and stays zero only when that depends on the others too.
size_t orthonormaliseWhole(float* x, size_t count, size_t length, uint64_t seed);

}  // namespace lowcomm

#include "kernels/finite.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>

namespace lowcomm {
namespace {

// Without their sign the bits of floats are in the order of the magnitudes, infinity and NaN above all.
template <class Bits>
int64_t firstFrom(const void* x, uint64_t n, Bits limit) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  using Signed = std::make_signed_t<Bits>;
  const std::byte* from = static_cast<const std::byte*>(x);
  // Below 0 where the element is refused: a subtraction, which vectors have for every type where they have comparisons
  // of signed ones alone.
  const auto room = [&](uint64_t i) {
    Bits bits;
    std::memcpy(&bits, from + i * sizeof(Bits), sizeof(Bits));
    return static_cast<Signed>(static_cast<Bits>(limit - 1) - static_cast<Bits>(bits & kMagnitude));
  };
  // Block by block without a branch an element: nearly always there is nothing to find.
  constexpr uint64_t kBlock = 1024;
  for (uint64_t at = 0; at < n; at += kBlock) {
    const uint64_t end = std::min(n, at + kBlock);
    Signed all = 0;
    for (uint64_t i = at; i < end; ++i)
      all |= room(i);
    for (uint64_t i = at; all < 0 && i < end; ++i) {
      if (room(i) < 0) return static_cast<int64_t>(i);
    }
  }
  return -1;
}

}  // namespace

static_assert(std::bit_cast<uint32_t>(kRotatedLimit) == kRotatedLimitBits);

int64_t firstNonFinite(const void* x, DType dtype, uint64_t n, float limit) {
  const uint32_t least = std::bit_cast<uint32_t>(limit);
  switch (dtype) {
    case DType::float32:
      return firstFrom<uint32_t>(x, n, least);
    case DType::bfloat16:
      return firstFrom<uint16_t>(x, n, static_cast<uint16_t>(least >> 16));
    case DType::float16:
      return firstFrom<uint16_t>(x, n, 0x7c00);  // infinity: its finite values are all below every limit
    default:
      return -1;
  }
}

void settleNans(float* x, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i)
    x[i] = x[i] == x[i] ? x[i] : std::bit_cast<float>(kPoison);
}

}  // namespace lowcomm

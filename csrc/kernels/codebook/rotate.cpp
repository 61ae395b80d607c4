// The reference of the rotation, to be read beside FORMAT.md "Rotation".
#include "kernels/codebook/rotate.h"
#include "kernels/isa/table.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/narrow_float.h"
#include "kernels/finite.h"

namespace lowcomm {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kRows = 32;
constexpr size_t kBlock = kLanes * kRows;

void changeSigns(float* block) {
  for (size_t e = 0; e < kBlock; ++e) {
    const uint32_t sign = kRotationSigns[e % kLanes] >> e / kLanes & 1;
    block[e] = floatOf(floatBits(block[e]) ^ sign << 31);
  }
}

void transform(float* block) {
  for (size_t h = 1; h < kRows; h *= 2) {
    for (size_t row = 0; row < kRows; ++row) {
      if (row & h) continue;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        float& a = block[row * kLanes + lane];
        float& b = block[(row + h) * kLanes + lane];
        const float sum = a + b, difference = a - b;
        a = sum;
        b = difference;
      }
    }
  }
  for (size_t e = 0; e < kBlock; ++e)
    block[e] *= kRotationScale;
}

bool rotate(float* y, const float* x, size_t count) {
  bool taken = true;
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    float block[kBlock] = {};
    std::copy_n(x + at, n, block);
    for (float value : block)
      taken &= (floatBits(value) & 0x7fffffffu) < floatBits(kRotatedLimit);
    changeSigns(block);
    transform(block);
    std::copy_n(block, kBlock, y + at);
  }
  return taken;
}

template <bool kAdd>
void unrotate(float* y, const float* x, size_t count) {
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    float block[kBlock];
    std::copy_n(x + at, kBlock, block);
    transform(block);
    changeSigns(block);
    for (size_t i = 0; i < n; ++i)
      y[at + i] = kAdd ? y[at + i] + block[i] : block[i];
  }
}

}  // namespace

namespace scalar {
constexpr RotationLoops kRotation = {rotate, {unrotate<false>, unrotate<true>}};
}  // namespace scalar

}  // namespace lowcomm

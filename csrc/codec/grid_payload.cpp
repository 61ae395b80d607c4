#include "codec/grid.h"

#include <cstring>

#include "base/error.h"
#include "base/narrow_float.h"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"

namespace lowcomm {
GridRule gridRule(const GridFamily& family) {
  if (family.book) return family.centred ? GridRule::gauss : GridRule::levels;
  if (family.centred) return family.id == CodecId::sign1 ? GridRule::sign : GridRule::centred;
  switch (family.rounding) {
    case Rounding::nearest:
      return GridRule::nearest;
    case Rounding::stochastic:
      return GridRule::stochastic;
    case Rounding::dithered:
      return GridRule::dithered;
  }
  return GridRule::nearest;
}

GridForm gridForm(const CodecSpec& spec) {
  GridForm form;
  form.bucket = spec.bucket;
  form.bf16 = spec.meta == Meta::bf16;
  form.rms = spec.range == Range::l2;
  const float half = static_cast<float>(1 << (spec.bits - 1));  // H
  switch (spec.id) {
    case CodecId::sym:
      form.divisor = form.numerator = form.centre = half;
      form.low = -half;
      form.high = half - 1;
      form.magic = 256.5f + half;
      break;
    case CodecId::mid:
      form.divisor = half;
      form.numerator = form.high = half - 0x1p-13f;  // a largest element just below the level that is none
      form.low = -form.high;
      form.magic = 256 + half;
      form.centre = half - 0.5f;
      break;
    case CodecId::gauss:
      form.rms = true;  // a range of 2·rms, of which half is sent and divided by
      form.divisor = form.numerator = 2;
      form.gain = spec.gain;
      form.book = &gaussCodebook(spec.bits);
      break;
    case CodecId::sign1:
      form.centre = 0.5f;  // (0 or 1 - 1/2)·2·mean: both products exact
      form.unit = 2;
      break;
    default:
      break;
  }
  return form;
}

GridScales::GridScales(const CodecSpec& spec)
    : numbers(gridFamily(spec.id) && gridFamily(spec.id)->centred ? 1 : 2),
      number_bytes(spec.meta == Meta::bf16 ? 2 : 4),
      meta(spec.meta),
      nonfinite(spec.nonfinite) {}

void GridScales::poison(std::byte* scales, uint64_t bucket) const {
  std::byte* to = putScale(scales + bytes(bucket), floatOf(kPoison), meta == Meta::bf16);
  if (numbers == 2) putScale(to, 0, meta == Meta::bf16);
}

bool GridScales::isPoison(const std::byte* scales, uint64_t bucket) const {
  const bool bf16 = meta == Meta::bf16;
  return nonfinite == Nonfinite::poison && floatBits(scaleAt(scales, bucket * numbers, bf16)) == kPoison &&
         (numbers == 1 || floatBits(scaleAt(scales, bucket * 2 + 1, bf16)) == 0);
}

void GridScales::expectFinite(const std::byte* scales, uint64_t buckets, const std::string& codec,
                              const char* of) const {
  for (size_t i = 0; i < numbers * buckets; ++i) {
    const float scale = scaleAt(scales, i, meta == Meta::bf16);
    if ((floatBits(scale) & 0x7f800000u) == 0x7f800000u && !isPoison(scales, i / numbers)) {
      throw WireError(codec + ": " + ((i + 1) % numbers == 0 ? "step" : "base") + " of " + of + " " +
                      std::to_string(i / numbers) + ": expected a finite number, got " + std::to_string(scale));
    }
  }
}

size_t gridWordBytes(int bits, uint64_t count) {
  const uint64_t width = static_cast<uint64_t>(bits), rows = (count % kCodeBlock + kCodeLanes - 1) / kCodeLanes;
  return 64 * (width * (count / kCodeBlock) + (rows * width + 31) / 32);
}

void expectUnusedZero(std::span<const std::byte> words, int bits, uint64_t count, const std::string& codec,
                      bool rotated) {
  const uint64_t width = static_cast<uint64_t>(bits);
  // Only the last block can have unused bits: those of its lanes past their last row. A rotated lane has all its rows
  // or holds no element.
  const uint64_t rest = count % kCodeBlock;
  if (rest == 0) return;
  const std::byte* block = words.data() + gridWordBytes(bits, count - rest);
  const uint64_t words_a_lane = gridWordBytes(bits, rotated ? kCodeBlock : rest) / 64;
  for (uint64_t lane = 0; lane < kCodeLanes; ++lane) {
    const uint64_t filled = (rest + kCodeLanes - 1 - lane) / kCodeLanes;
    const uint64_t rows = rotated && filled > 0 ? kCodeBlock / kCodeLanes : filled;
    const uint64_t used = rows * width;
    for (uint64_t word = used / 32; word < words_a_lane; ++word) {
      uint32_t stored;
      std::memcpy(&stored, block + (word * kCodeLanes + lane) * 4, 4);
      const uint32_t unused = word == used / 32 ? stored >> (used % 32) : stored;
      if (unused != 0) {
        throw WireError(codec + ": unused code bits of lane " + std::to_string(lane) +
                        " in the last block: expected 0, got " + std::to_string(unused));
      }
    }
  }
}

}  // namespace lowcomm

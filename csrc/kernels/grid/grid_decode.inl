// From codes to elements, on grid_vector.inl's vectors; part of it.

namespace lowcomm {
namespace {

// Base and step of a bucket; its code's centre, or gain, and step.
template <GridValue kValue>
LOWCOMM_INLINE void loadScale(float* scale, const std::byte* meta, size_t bucket, const GridForm& form) {
  if constexpr (kValue == GridValue::affine || kValue == GridValue::levels) {
    scale[0] = scaleAt(meta, 2 * bucket, form.bf16);
    scale[1] = scaleAt(meta, 2 * bucket + 1, form.bf16);
  } else {
    scale[0] = kValue == GridValue::gauss ? form.gain : form.centre;
    scale[1] = scaleAt(meta, bucket, form.bf16) * form.unit;
  }
}

template <int kBits, bool kAdd, GridValue kValue, int kRows>
LOWCOMM_INLINE void decodeBlock(float* y, const std::byte* words, const float* scales, const GridForm& form) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  for (int part = 0; part < kRegistersARow; ++part) {
    const size_t lane = static_cast<size_t>(part) * kLanes;
    Words packed[kBits];
    for (int i = 0; i < kBits; ++i)
      packed[i] = loadWords(words + (16 * i + lane) * 4);
    Floats base = splat(scales[0]), step = splat(scales[1]);
#pragma GCC unroll 32
    for (int row = 0; row < 32; ++row) {
      if (row > 0 && row % kRows == 0) {
        base = splat(scales[2 * (row / kRows)]);
        step = splat(scales[2 * (row / kRows) + 1]);
      }
      const int at = row * kBits % 32, word = row * kBits / 32;
      Words code = packed[word] >> at;
      if (at + kBits > 32) code |= packed[word + 1] << (32 - at);
      if (at + kBits != 32) code &= kTop;
      const Floats number = numberOf<kBits, kValue>(code, form);
      const Floats value = kValue == GridValue::centred ? (number - base) * step
                           : kValue == GridValue::gauss ? number * step * base
                                                        : base + step * number;
      float* to = y + 16 * row + lane;
      store(to, kAdd ? load(to) + value : value);
    }
  }
}

template <int kBits, bool kAdd, GridValue kValue, int kRows>
void decodeRun(float* y, const std::byte* meta, const std::byte* words, size_t count, const GridForm& form) {
  constexpr size_t kBlockBytes = 64 * kBits;
  // Bytes from prefetch to prefetch of what is written: stores alone fetch their lines too late. Each is an instruction
  // more for 16 elements, or for 32 where lines come in pairs; additions that are narrow do better without.
  constexpr size_t kStride = kLanes == 16 ? 64 : kAdd ? 0 : 128;
  const uint32_t bucket = form.bucket;
  float scales[2 * 32 / kRows];
  for (size_t at = 0; at < count; at += kBlock, words += kBlockBytes) {
    const size_t n = count - at < kBlock ? count - at : kBlock;
    if (kRows == 32) {
      loadScale<kValue>(scales, meta, at / bucket, form);
    } else {
      for (size_t i = 0; i < 8; ++i) {
        // Past the end the last bucket's again: what it makes is thrown away, but its metadata is there to read.
        const size_t of = at + 64 * i < count ? at + 64 * i : count - 1;
        loadScale<kValue>(scales + 2 * i, meta, of / bucket, form);
      }
    }
    if (n == kBlock) {
      for (size_t line = 0; line < kBlockBytes; line += kBits > 4 ? 64 : kBlockBytes)
        __builtin_prefetch(words + 2 * kBlockBytes + line);
      if constexpr (kStride > 0) {
        const auto* soon = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(y + at) + 4 * kPrefetchWritten);
#pragma GCC unroll 32
        for (size_t byte = 0; byte < 4 * kBlock; byte += kStride)
          __builtin_prefetch(soon + byte, 1);
      }
      decodeBlock<kBits, kAdd, kValue, kRows>(y + at, words, scales, form);
      continue;
    }
    std::byte whole[kBlockBytes] = {};
    float values[kBlock];
    __builtin_memcpy(whole, words, ((n + 15) / 16 * kBits + 31) / 32 * 64);
    decodeBlock<kBits, false, kValue, kRows>(values, whole, scales, form);
    for (size_t i = 0; i < n; ++i)
      y[at + i] = kAdd ? y[at + i] + values[i] : values[i];
  }
}

template <int kBits, bool kAdd, GridValue kValue>
void decodeGrid(float* y, const std::byte* meta, const std::byte* words, size_t count, const GridForm& form) {
  return form.bucket < kBlock ? decodeRun<kBits, kAdd, kValue, 4>(y, meta, words, count, form)
                              : decodeRun<kBits, kAdd, kValue, 32>(y, meta, words, count, form);
}

}  // namespace
}  // namespace lowcomm

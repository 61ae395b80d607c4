#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/spec.h"

namespace lowcomm {

// The elements themselves, little-endian, filled with zeros to a multiple of 64 bytes. Takes every element type.
class NoneCodec final : public Codec {
 public:
  explicit NoneCodec(const CodecSpec& spec) : Codec(spec) {}

  uint64_t granularity() const override { return 512; }
  bool supports(DType dtype) const override { return itemBytes(dtype) != 0; }
  size_t encodedBytes(uint64_t count, DType dtype) const override;
  void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
              const Draws& draws) const override;
  void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const override;
  void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                 uint64_t count) const override;

  // The elements of a payload where they stand, for a reader that needs no copy. Throws as decode.
  static std::span<const std::byte> elements(DType dtype, std::span<const std::byte> src, uint64_t count);
};

}  // namespace lowcomm

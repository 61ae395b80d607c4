#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "codec/scalar_rules.h"

namespace lowcomm {

// How projected gradients travel (Just One Byte, section 3): "logbyte" (a byte each), "log9" (nine bits), "fp16",
// "none" (fp32), or "sign1", the sign alone, in two bits: 0 for a zero, 1 for +1, 2 for no number, 3 for -1. Codes
// stand one behind another from the lowest bit on, without the blocks of the codec of that name: messages have a few.
// Thread-safe.
class EstimateCodec {
 public:
  // Throws ValueError for another name.
  explicit EstimateCodec(const std::string& name);

  const std::string& name() const { return name_; }

  // Bytes of `count` estimates.
  size_t bytes(size_t count) const { return (count * bits_ + 7) / 8; }

  // An estimate that is not finite decodes to NaN or an infinity, and no machine applies it.
  std::vector<std::byte> encode(std::span<const float> estimates) const;

  // Throws WireError: a payload of another length than bytes(count).
  std::vector<float> decode(std::span<const std::byte> payload, size_t count) const;

 private:
  uint32_t code(float estimate) const;
  float value(uint32_t code) const;

  std::string name_;
  uint32_t bits_;                       // of a code
  const ScalarTable* table_ = nullptr;  // of logbyte and log9
};

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "codec/codec.h"

namespace lowcomm {

// How projected gradients travel (Just One Byte, section 3.1): "logbyte" (8 bits), "log9" (9), "fp16", "none" (fp32),
// or "sign1", the sign alone, in two bits: 0 for a zero or no number, 1 for +1, 3 for -1. Thread-safe.
class EstimateCodec {
 public:
  // Throws ValueError for another name.
  explicit EstimateCodec(const std::string& name);

  const std::string& name() const { return name_; }

  // Bytes of `count` estimates.
  size_t bytes(size_t count) const;

  // What is not finite becomes what decodes to NaN, or to 0 under sign1: nobody applies it.
  std::vector<std::byte> encode(std::span<const float> estimates) const;

  // Throws WireError: a payload of another length than bytes(count).
  std::vector<float> decode(std::span<const std::byte> payload, size_t count) const;

 private:
  std::string name_;
  std::shared_ptr<const Codec> scalar_;  // of logbyte and log9
};

}  // namespace lowcomm

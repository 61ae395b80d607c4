#include "seed_replay/estimate_codec.h"

#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/narrow_float.h"

namespace lowcomm {

EstimateCodec::EstimateCodec(const std::string& name) : name_(name) {
  if (name == "logbyte" || name == "log9") {
    table_ = name == "logbyte" ? &kLogByteTable : &kLog9Table;
    bits_ = table_->bits;
  } else if (name == "fp16" || name == "none" || name == "sign1") {
    bits_ = name == "fp16" ? 16 : name == "none" ? 32 : 2;
  } else {
    throw ValueError("seed replay: codec: expected logbyte, log9, fp16, none or sign1, got '" + name + "'");
  }
}

uint32_t EstimateCodec::code(float estimate) const {
  if (table_) return scalarCode(*table_, estimate);
  if (bits_ == 32) return floatBits(estimate);
  if (bits_ == 16) return floatToFloat16(estimate);
  return !std::isfinite(estimate) ? 2 : estimate == 0 ? 0 : estimate > 0 ? 1 : 3;
}

float EstimateCodec::value(uint32_t code) const {
  if (table_) return scalarValue(*table_, code);
  if (bits_ == 32) return floatOf(code);
  if (bits_ == 16) return float16ToFloat(static_cast<uint16_t>(code));
  constexpr float kSigns[] = {0.0f, 1.0f, std::numeric_limits<float>::quiet_NaN(), -1.0f};
  return kSigns[code];
}

std::vector<std::byte> EstimateCodec::encode(std::span<const float> estimates) const {
  std::vector<std::byte> out(bytes(estimates.size()));
  for (size_t i = 0; i < estimates.size(); ++i) {
    const uint64_t shifted = uint64_t{code(estimates[i])} << (i * bits_ % 8);
    for (size_t b = i * bits_ / 8; b < ((i + 1) * bits_ + 7) / 8; ++b)
      out[b] |= static_cast<std::byte>(shifted >> (8 * (b - i * bits_ / 8)));
  }
  return out;
}

std::vector<float> EstimateCodec::decode(std::span<const std::byte> payload, size_t count) const {
  if (payload.size() != bytes(count)) {
    throw WireError("seed replay: payload of " + std::to_string(count) + " estimates in " + name_ + ": expected " +
                    std::to_string(bytes(count)) + " bytes, got " + std::to_string(payload.size()));
  }
  std::vector<float> out(count);
  for (size_t i = 0; i < count; ++i) {
    uint64_t word = 0;
    for (size_t b = i * bits_ / 8; b < ((i + 1) * bits_ + 7) / 8; ++b)
      word |= std::to_integer<uint64_t>(payload[b]) << (8 * (b - i * bits_ / 8));
    out[i] = value(static_cast<uint32_t>(word >> (i * bits_ % 8) & ((uint64_t{1} << bits_) - 1)));
  }
  return out;
}

}  // namespace lowcomm

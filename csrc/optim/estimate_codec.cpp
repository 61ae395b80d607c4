#include "optim/estimate_codec.h"

#include <cmath>
#include <cstring>

#include "codec/error.h"
#include "kernels/half.h"

namespace lowcomm {

EstimateCodec::EstimateCodec(const std::string& name) : name_(name) {
  if (name == "logbyte" || name == "log9") {
    scalar_ = makeCodec(CodecSpec::parse(name));
  } else if (name != "fp16" && name != "none" && name != "sign1") {
    throw ValueError("seed replay: codec: expected logbyte, log9, fp16, none or sign1, got '" + name + "'");
  }
}

size_t EstimateCodec::bytes(size_t count) const {
  if (scalar_) return scalar_->encodedBytes(count, DType::float32);
  if (name_ == "sign1") return (count + 3) / 4;
  return count * (name_ == "fp16" ? 2 : 4);
}

std::vector<std::byte> EstimateCodec::encode(std::span<const float> estimates) const {
  std::vector<std::byte> out(bytes(estimates.size()));
  if (scalar_) {
    scalar_->encode(out, estimates.data(), DType::float32, 0, estimates.size(), {});
    return out;
  }
  for (size_t i = 0; i < estimates.size(); ++i) {
    const float x = estimates[i];
    if (name_ == "none") {
      std::memcpy(&out[4 * i], &x, 4);
    } else if (name_ == "fp16") {
      const uint16_t half = floatToFloat16(x);
      std::memcpy(&out[2 * i], &half, 2);
    } else {
      const unsigned code = !std::isfinite(x) || x == 0 ? 0 : x > 0 ? 1 : 3;
      out[i / 4] |= static_cast<std::byte>(code << (2 * (i % 4)));
    }
  }
  return out;
}

std::vector<float> EstimateCodec::decode(std::span<const std::byte> payload, size_t count) const {
  if (payload.size() != bytes(count)) {
    throw WireError("seed replay: payload of " + std::to_string(count) + " estimates in " + name_ + ": expected " +
                    std::to_string(bytes(count)) + " bytes, got " + std::to_string(payload.size()));
  }
  std::vector<float> out(count);
  if (scalar_) {
    scalar_->decode(out.data(), DType::float32, payload, 0, count);
    return out;
  }
  for (size_t i = 0; i < count; ++i) {
    if (name_ == "none") {
      std::memcpy(&out[i], &payload[4 * i], 4);
    } else if (name_ == "fp16") {
      uint16_t half;
      std::memcpy(&half, &payload[2 * i], 2);
      out[i] = float16ToFloat(half);
    } else {
      const unsigned code = std::to_integer<unsigned>(payload[i / 4]) >> (2 * (i % 4)) & 3u;
      out[i] = code == 1 ? 1.0f : code == 3 ? -1.0f : 0.0f;
    }
  }
  return out;
}

}  // namespace lowcomm

#include "codec/scalar.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/float_env.h"
#include "base/half.h"
#include "codec/element.h"
#include "codec/payload.h"
#include "kernels/reduce.h"

namespace lowcomm {

ScalarCodec::ScalarCodec(const CodecSpec& spec)
    : Codec(spec),
      name_(spec.str()),
      table_(spec.id == CodecId::logbyte ? kLogByteTable : kLog9Table),
      bits_(table_.bits) {}

bool ScalarCodec::supports(DType dtype) const {
  return isCoded(dtype);
}

size_t ScalarCodec::encodedBytes(uint64_t count, DType) const {
  return up64((count * bits_ + 7) / 8);
}

void ScalarCodec::checkRun(DType dtype, uint64_t first) const {
  if (!supports(dtype)) {
    throw TypeError(name_ + ": expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
  if (first % granularity() != 0) {
    throw ValueError(name_ + ": first element: expected a multiple of " + std::to_string(granularity()) + ", got " +
                     std::to_string(first));
  }
}

void ScalarCodec::encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                         const Draws&) const {
  checkRun(dtype, first);
  expectBytes<ValueError>(name_, encodedBytes(count, dtype), dst.size());
  if (count == 0) return;
  std::memset(dst.data(), 0, dst.size());
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t bit = i * bits_;
    const uint32_t placed = scalarCode(table_, elementAt(src, dtype, i)) << bit % 8;
    dst[bit / 8] |= static_cast<std::byte>(placed);
    if (bit % 8 + bits_ > 8) dst[bit / 8 + 1] |= static_cast<std::byte>(placed >> 8);
  }
}

uint32_t ScalarCodec::codeAt(std::span<const std::byte> src, uint64_t i) const {
  const uint64_t bit = i * bits_;
  uint32_t word = std::to_integer<uint32_t>(src[bit / 8]);
  if (bit % 8 + bits_ > 8) word |= std::to_integer<uint32_t>(src[bit / 8 + 1]) << 8;
  return word >> bit % 8 & ((1u << bits_) - 1);
}

void ScalarCodec::checkPayload(std::span<const std::byte> src, uint64_t count) const {
  expectBytes<WireError>(name_, encodedBytes(count, DType::float32), src.size());
  const uint64_t used = count * bits_, whole = (used + 7) / 8;
  expectZero(src.subspan(whole), name_, "padding");
  if (used % 8 != 0 && std::to_integer<uint32_t>(src[whole - 1]) >> used % 8 != 0) {
    throw WireError(name_ + ": unused bits of the last code's byte: expected 0, got " +
                    std::to_string(std::to_integer<uint32_t>(src[whole - 1]) >> used % 8));
  }
}

void ScalarCodec::decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  for (uint64_t i = 0; i < count; ++i) {
    const float value = scalarValue(table_, codeAt(src, i));
    if (dtype == DType::float32) {
      static_cast<float*>(dst)[i] = value;
    } else {
      static_cast<uint16_t*>(dst)[i] = dtype == DType::float16 ? floatToFloat16(value) : floatToBfloat16(value);
    }
  }
}

void ScalarCodec::decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                            uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  const FloatEnv env;
  float piece[512];
  for (uint64_t at = 0; at < count; at += std::size(piece)) {
    const uint64_t n = std::min<uint64_t>(std::size(piece), count - at);
    for (uint64_t i = 0; i < n; ++i)
      piece[i] = scalarValue(table_, codeAt(src, at + i));
    reduceInto(acc + at, piece, DType::float32, ReduceKind::sum, n);
  }
}

}  // namespace lowcomm

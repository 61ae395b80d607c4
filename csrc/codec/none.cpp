#include "codec/none.h"

#include <bit>
#include <cstring>

#include "codec/dispatch.h"
#include "codec/payload.h"
#include "kernels/float_env.h"

namespace lowcomm {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian and are copied as they stand");

namespace {

constexpr const char* kName = "none";
constexpr uint64_t kPiece = 512;  // elements converted at a time

// Not inlined: FloatEnv orders calls, not arithmetic.
template <typename T>
[[gnu::noinline]] void addAs(float* acc, const std::byte* src, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    T value;  // a payload has no alignment to rely on
    std::memcpy(&value, src + i * sizeof(T), sizeof(T));
    acc[i] += static_cast<float>(value);
  }
}

template <typename Convert>
void addConverted(float* acc, const std::byte* src, uint64_t count, Convert convert) {
  uint16_t halves[kPiece];
  float floats[kPiece];
  for (uint64_t at = 0; at < count; at += kPiece) {
    const uint64_t n = std::min(kPiece, count - at);
    std::memcpy(halves, src + at * 2, n * 2);
    convert(floats, halves, n);
    addAs<float>(acc + at, reinterpret_cast<const std::byte*>(floats), n);
  }
}

}  // namespace

size_t NoneCodec::encodedBytes(uint64_t count, DType dtype) const {
  return up64(count * itemBytes(dtype));
}

void NoneCodec::encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t, uint64_t count,
                       const Draws&) const {
  if (!supports(dtype)) throw TypeError("none: expected an element type, got " + std::string(dtypeName(dtype)));
  expectBytes<ValueError>(kName, encodedBytes(count, dtype), dst.size());
  const size_t bytes = count * itemBytes(dtype);
  if (bytes == 0) return;
  std::memcpy(dst.data(), src, bytes);
  std::memset(dst.data() + bytes, 0, dst.size() - bytes);
}

std::span<const std::byte> NoneCodec::elements(DType dtype, std::span<const std::byte> src, uint64_t count) {
  if (itemBytes(dtype) == 0) throw TypeError("none: expected an element type, got " + std::string(dtypeName(dtype)));
  const size_t bytes = count * itemBytes(dtype);
  expectBytes<WireError>(kName, up64(bytes), src.size());
  expectZero(src.subspan(bytes), kName, "padding");
  return src.first(bytes);
}

void NoneCodec::decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t, uint64_t count) const {
  const std::span<const std::byte> from = elements(dtype, src, count);
  if (!from.empty()) std::memcpy(dst, from.data(), from.size());
}

void NoneCodec::decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t, uint64_t count) const {
  elements(dtype, src, count);
  FloatEnv env;
  switch (dtype) {
    case DType::float32:
      return addAs<float>(acc, src.data(), count);
    case DType::float64:
      return addAs<double>(acc, src.data(), count);
    case DType::float16:
      return addConverted(acc, src.data(), count, kernels().float16_to_float);
    case DType::bfloat16:
      return addConverted(acc, src.data(), count, kernels().bfloat16_to_float);
    case DType::int8:
      return addAs<int8_t>(acc, src.data(), count);
    case DType::uint8:
    case DType::boolean:
      return addAs<uint8_t>(acc, src.data(), count);
    case DType::int16:
      return addAs<int16_t>(acc, src.data(), count);
    case DType::int32:
      return addAs<int32_t>(acc, src.data(), count);
    case DType::int64:
      return addAs<int64_t>(acc, src.data(), count);
    case DType::opaque:
      break;
  }
  throw TypeError("none: expected elements that can be added, got " + std::string(dtypeName(dtype)));
}

}  // namespace lowcomm

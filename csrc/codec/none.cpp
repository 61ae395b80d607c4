#include "codec/none.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "codec/payload.h"

namespace lowcomm {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian and are copied as they stand");

namespace {

constexpr const char* kName = "none";

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

void NoneCodec::decodeAdd(float*, DType, std::span<const std::byte>, uint64_t, uint64_t) const {
  throw TypeError("none: expected a codec whose values are fp32, got exact elements to add");
}

}  // namespace lowcomm

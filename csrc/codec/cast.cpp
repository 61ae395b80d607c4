#include "codec/cast.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/float8.h"
#include "base/float_env.h"
#include "base/half.h"
#include "codec/element.h"
#include "codec/nonfinite.h"
#include "codec/payload.h"
#include "codec/repair.h"
#include "kernels/cast/cast.h"
#include "kernels/cast/cast_rules.h"
#include "kernels/finite.h"

namespace lowcomm {
namespace {

constexpr uint64_t kBlock = 512;
constexpr uint64_t kPiece = 2048;  // elements between two types that are not fp32 go through it this many at a time

DType typeOf(CodecId id) {
  if (id == CodecId::fp16) return DType::float16;
  return id == CodecId::bf16 ? DType::bfloat16 : DType::opaque;
}

// The code that a poisoned element sends: the type's quiet NaN.
uint16_t nanOf(DType type) {
  return type == DType::float16 ? kFloat16Nan : type == DType::bfloat16 ? kBfloat16Nan : kFloat8Nan;
}

// Of a 16-bit type.
uint16_t infinityOf(DType type) {
  return type == DType::float16 ? 0x7c00 : 0x7f80;
}

// Whether a code is NaN or infinite.
bool isSpecialCode(DType type, uint16_t code) {
  if (type == DType::opaque) return (code & 0x7fu) == kFloat8Nan;
  return (code & infinityOf(type)) == infinityOf(type);
}

}  // namespace

CastCodec::CastCodec(const CodecSpec& spec, const KernelTable& table)
    : Codec(spec), table_(table), name_(spec.str()), type_(typeOf(spec.id)), item_(type_ == DType::opaque ? 1 : 2) {}

bool CastCodec::supports(DType dtype) const {
  return isCoded(dtype);
}

size_t CastCodec::encodedBytes(uint64_t count, DType) const {
  return up64(count * item_);
}

void CastCodec::checkRun(DType dtype, uint64_t first) const {
  if (!supports(dtype)) {
    throw TypeError(name_ + ": expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
  if (first % granularity() != 0) {
    throw ValueError(name_ + ": first element: expected a multiple of " + std::to_string(granularity()) + ", got " +
                     std::to_string(first));
  }
}

void CastCodec::encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                       const Draws& draws) const {
  checkRun(dtype, first);
  expectBytes<ValueError>(name_, encodedBytes(count, dtype), dst.size());
  if (count == 0) return;
  std::memset(dst.data() + count * item_, 0, dst.size() - count * item_);
  const PhiloxKey key{draws.seed, draws.stream, draws.step};
  if (encodeTaken(dst.data(), src, dtype, first, count, key)) return;
  expectTaken(src, dtype, first, count, "");

  const size_t bytes = count * itemBytes(dtype);
  const auto copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
  std::memcpy(copy.get(), src, bytes);
  std::vector<uint64_t> poisoned;
  if (spec().nonfinite == Nonfinite::saturate) {
    repair(copy.get(), dtype, count);
  } else {
    poisoned = blankEach(copy.get(), dtype, count);
  }
  if (!encodeTaken(dst.data(), copy.get(), dtype, first, count, key)) {
    throw ValueError(name_ + ": expected elements that stay as they are until the op is done, got some that changed");
  }
  poison(dst.data(), poisoned);
}

void CastCodec::expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count, const std::string& of) const {
  if (spec().nonfinite == Nonfinite::error) expectFinite(spec(), src, dtype, first, count, of);
}

bool CastCodec::needsRepair(const void* src, DType dtype, uint64_t count) const {
  return spec().nonfinite == Nonfinite::saturate && firstNonFinite(src, dtype, count, finiteLimit(spec())) >= 0;
}

void CastCodec::repair(void* x, DType dtype, uint64_t count) const {
  saturateEach(x, dtype, count);
}

void CastCodec::poison(std::byte* dst, const std::vector<uint64_t>& elements) const {
  const uint16_t nan = nanOf(type_);
  for (uint64_t e : elements)
    std::memcpy(dst + e * item_, &nan, item_);
}

bool CastCodec::encodeTaken(std::byte* dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                            const PhiloxKey& key) const {
  if (same(dtype)) {
    return table_.casts->copy(reinterpret_cast<Code16*>(dst), static_cast<const Code16*>(src), count,
                              infinityOf(type_));
  }
  FloatEnv env;
  if (dtype == DType::float32) return narrow(dst, static_cast<const float*>(src), count, first / kBlock, key);
  const auto convert = dtype == DType::float16 ? table_.float16_to_float : table_.bfloat16_to_float;
  alignas(64) float piece[kPiece];
  for (uint64_t at = 0; at < count; at += kPiece) {
    const uint64_t n = std::min(kPiece, count - at);
    convert(piece, static_cast<const uint16_t*>(src) + at, n);
    if (!narrow(dst + at * item_, piece, n, (first + at) / kBlock, key)) return false;
  }
  return true;
}

bool CastCodec::narrow(std::byte* dst, const float* x, uint64_t count, uint64_t block, const PhiloxKey& key) const {
  const CastKernels& casts = *table_.casts;
  auto* codes = reinterpret_cast<Code16*>(dst);
  if (type_ == DType::opaque) return casts.to_float8(reinterpret_cast<uint8_t*>(dst), x, count);
  if (type_ == DType::float16) return casts.to_float16(codes, x, count);
  if (spec().stochastic) return casts.to_bfloat16_by_draw(codes, x, count, block, key);
  return casts.to_bfloat16(codes, x, count);
}

bool CastCodec::widen(float* y, const std::byte* src, uint64_t count, bool add) const {
  const CastKernels& casts = *table_.casts;
  const auto* codes = reinterpret_cast<const Code16*>(src);
  if (type_ == DType::opaque) {
    return (add ? casts.add_float8 : casts.from_float8)(y, reinterpret_cast<const uint8_t*>(src), count);
  }
  if (type_ == DType::float16) return (add ? casts.add_float16 : casts.from_float16)(y, codes, count);
  return (add ? casts.add_bfloat16 : casts.from_bfloat16)(y, codes, count);
}

void CastCodec::checkPayload(std::span<const std::byte> src, uint64_t count) const {
  expectBytes<WireError>(name_, encodedBytes(count, DType::float32), src.size());
  expectZero(src.subspan(count * item_), name_, "padding");
}

// Codes among which a kernel met one that is not finite: only the NaN of a poisoned element may be it.
void CastCodec::expectCodes(const std::byte* src, uint64_t from, uint64_t count) const {
  for (uint64_t i = from; i < from + count; ++i) {
    uint16_t code = 0;
    std::memcpy(&code, src + i * item_, item_);
    if (!isSpecialCode(type_, code) || (spec().nonfinite == Nonfinite::poison && code == nanOf(type_))) continue;
    throw WireError(name_ + ": element " + std::to_string(i) + " of the payload: expected a finite number, got code " +
                    std::to_string(code));
  }
}

void CastCodec::decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  if (same(dtype)) {
    const auto* codes = reinterpret_cast<const Code16*>(src.data());
    if (!table_.casts->copy(static_cast<Code16*>(dst), codes, count, infinityOf(type_))) {
      expectCodes(src.data(), 0, count);
    }
    return;
  }
  FloatEnv env;
  if (dtype == DType::float32) {
    if (!widen(static_cast<float*>(dst), src.data(), count, false)) expectCodes(src.data(), 0, count);
    return;
  }
  alignas(64) float piece[kPiece];
  for (uint64_t at = 0; at < count; at += kPiece) {
    const uint64_t n = std::min(kPiece, count - at);
    if (!widen(piece, src.data() + at * item_, n, false)) expectCodes(src.data(), at, n);
    roundTo(static_cast<uint16_t*>(dst) + at, dtype, piece, n);
  }
}

// Finite values stay finite: float16's largest is in place of what is beyond it.
void CastCodec::roundTo(uint16_t* dst, DType dtype, const float* x, uint64_t count) const {
  if (dtype == DType::bfloat16) {
    table_.float_to_bfloat16(dst, x, count);  // of a narrower type's values all are in range
  } else if (!table_.casts->to_float16(reinterpret_cast<Code16*>(dst), x, count)) {
    for (uint64_t i = 0; i < count; ++i) {
      dst[i] =
          x[i] != x[i] ? nanOf(DType::float16) : floatToFloat16(std::clamp(x[i], -kFloat16Largest, kFloat16Largest));
    }
  }
}

void CastCodec::decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                          uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  FloatEnv env;
  if (!widen(acc, src.data(), count, true)) expectCodes(src.data(), 0, count);
}

}  // namespace lowcomm

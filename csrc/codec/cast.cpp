// fp16 and bf16 (FORMAT.md, "Casts"): every element by itself in a narrower floating type, to the nearest value.
// Elements that have the type already travel as they are.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/float_env.h"
#include "base/narrow_float.h"
#include "codec/float_codec.h"
#include "codec/nonfinite.h"
#include "kernels/cast/cast.h"

namespace lowcomm {
namespace {

constexpr uint64_t kBlock = 512;
constexpr size_t kItem = 2;        // bytes of a code
constexpr uint64_t kPiece = 2048;  // elements between two types that are not fp32 go through it this many at a time

// The code that a poisoned element sends: the type's quiet NaN.
uint16_t nanOf(DType type) {
  return type == DType::float16 ? kFloat16Nan : kBfloat16Nan;
}

// The bits of infinity.
uint16_t infinityOf(DType type) {
  return type == DType::float16 ? 0x7c00 : 0x7f80;
}

// Whether a code is NaN or infinite.
bool isSpecialCode(DType type, uint16_t code) {
  return (code & infinityOf(type)) == infinityOf(type);
}

class CastCodec final : public FloatCodec {
 public:
  CastCodec(const CodecSpec& spec, const KernelTable& table)
      : FloatCodec(spec, table), type_(spec.id == CodecId::fp16 ? DType::float16 : DType::bfloat16) {}

  uint64_t granularity() const override { return kBlock; }
  size_t encodedBytes(uint64_t count, DType) const override { return up64(count * kItem); }
  std::optional<size_t> headBytes(uint64_t, DType) const override { return 0; }

 private:
  // Whether elements of this type are the codes.
  bool same(DType dtype) const { return dtype == type_; }

  bool encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t, uint64_t count,
                   const PhiloxKey&) const override {
    std::memset(dst.data() + count * kItem, 0, dst.size() - count * kItem);
    if (same(dtype)) {
      return casts().copy(reinterpret_cast<Code16*>(dst.data()), static_cast<const Code16*>(src), count,
                          infinityOf(type_));
    }
    FloatEnv env;
    if (dtype == DType::float32) return narrow(dst.data(), static_cast<const float*>(src), count);
    alignas(64) float piece[kPiece];
    for (uint64_t at = 0; at < count; at += kPiece) {
      const uint64_t n = std::min(kPiece, count - at);
      widening(dtype)(piece, static_cast<const uint16_t*>(src) + at, n);
      if (!narrow(dst.data() + at * kItem, piece, n)) return false;
    }
    return true;
  }

  bool narrow(std::byte* dst, const float* x, uint64_t count) const {
    auto* codes = reinterpret_cast<Code16*>(dst);
    return (type_ == DType::float16 ? casts().to_float16 : casts().to_bfloat16)(codes, x, count);
  }

  std::vector<uint64_t> blankRefused(void* x, DType dtype, uint64_t count) const override {
    return blank(x, dtype, count, 1, finiteLimit(spec()));
  }
  void poison(std::span<std::byte> dst, uint64_t, uint64_t element) const override {
    const uint16_t nan = nanOf(type_);
    std::memcpy(dst.data() + element * kItem, &nan, kItem);
  }

  void checkPayload(std::span<const std::byte> src, uint64_t count) const override {
    expectBytes<WireError>(name(), encodedBytes(count, DType::float32), src.size());
    expectZero(src.subspan(count * kItem), name(), "padding");
  }

  // Codes among which a kernel met one that is not finite: only the NaN of a poisoned element may be it.
  void expectCodes(const std::byte* src, uint64_t from, uint64_t count) const {
    for (uint64_t i = from; i < from + count; ++i) {
      uint16_t code = 0;
      std::memcpy(&code, src + i * kItem, kItem);
      if (!isSpecialCode(type_, code) || (spec().nonfinite == Nonfinite::poison && code == nanOf(type_))) continue;
      throw WireError(name() + ": element " + std::to_string(i) +
                      " of the payload: expected a finite number, got code " + std::to_string(code));
    }
  }

  void decodeTo(void* dst, DType dtype, std::span<const std::byte> src, uint64_t count) const override {
    if (same(dtype)) {
      const auto* codes = reinterpret_cast<const Code16*>(src.data());
      if (!casts().copy(static_cast<Code16*>(dst), codes, count, infinityOf(type_))) expectCodes(src.data(), 0, count);
      return;
    }
    if (dtype == DType::float32) {
      if (!widen(static_cast<float*>(dst), src.data(), count, false)) expectCodes(src.data(), 0, count);
      return;
    }
    alignas(64) float piece[kPiece];
    for (uint64_t at = 0; at < count; at += kPiece) {
      const uint64_t n = std::min(kPiece, count - at);
      if (!widen(piece, src.data() + at * kItem, n, false)) expectCodes(src.data(), at, n);
      roundTo(static_cast<uint16_t*>(dst) + at, dtype, piece, n);
    }
  }

  void addTo(float* acc, std::span<const std::byte> src, uint64_t count) const override {
    if (!widen(acc, src.data(), count, true)) expectCodes(src.data(), 0, count);
  }

  bool widen(float* y, const std::byte* src, uint64_t count, bool add) const {
    const auto* codes = reinterpret_cast<const Code16*>(src);
    if (type_ == DType::float16) return (add ? casts().add_float16 : casts().from_float16)(y, codes, count);
    return (add ? casts().add_bfloat16 : casts().from_bfloat16)(y, codes, count);
  }

  // Finite values stay finite: float16's largest is in place of what is beyond it.
  void roundTo(uint16_t* dst, DType dtype, const float* x, uint64_t count) const {
    if (dtype == DType::bfloat16) {
      table().float_to_bfloat16(dst, x, count);  // of a narrower type's values all are in range
    } else if (!casts().to_float16(reinterpret_cast<Code16*>(dst), x, count)) {
      for (uint64_t i = 0; i < count; ++i) {
        dst[i] =
            x[i] != x[i] ? nanOf(DType::float16) : floatToFloat16(std::clamp(x[i], -kFloat16Largest, kFloat16Largest));
      }
    }
  }

  const CastKernels& casts() const { return *table().casts; }

  DType type_;  // of the codes
};

}  // namespace

std::shared_ptr<const Codec> makeCastCodec(const CodecSpec& spec, const KernelTable& table) {
  return std::make_shared<CastCodec>(spec, table);
}

}  // namespace lowcomm

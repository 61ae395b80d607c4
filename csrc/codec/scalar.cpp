// logbyte and log9 (FORMAT.md, "Scalars"): an element's sign and rounded logarithm in 8 or 9 bits, for the few numbers
// of forward-only fine-tuning (Zelikman et al.: Just One Byte (per Gradient); 2023), of which only the order of
// magnitude matters. Relative error at most 6.5 % or 3.2 % within 4e-4...2.6e3; what is beyond becomes the end of the
// range, and NaN or an infinity the code that decodes to NaN.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>

#include "base/error.h"
#include "codec/float_codec.h"
#include "codec/payload.h"
#include "codec/scalar_rules.h"
#include "kernels/reduce.h"

namespace lowcomm {
namespace {

class ScalarCodec final : public FloatCodec {
 public:
  ScalarCodec(const CodecSpec& spec, const KernelTable& table)
      : FloatCodec(spec, table), numbers_(spec.id == CodecId::logbyte ? kLogByteTable : kLog9Table) {}

  uint64_t granularity() const override { return 512; }
  size_t encodedBytes(uint64_t count, DType) const override { return up64((count * numbers_.bits + 7) / 8); }
  std::optional<size_t> headBytes(uint64_t, DType) const override { return 0; }

  // Every element has a code.
  void expectTaken(const void*, DType, uint64_t, uint64_t, const std::string&) const override {}

 private:
  bool encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t, uint64_t count,
                   const PhiloxKey&) const override {
    const uint32_t bits = numbers_.bits;
    std::memset(dst.data(), 0, dst.size());
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t bit = i * bits;
      const uint32_t placed = scalarCode(numbers_, elementAt(src, dtype, i)) << bit % 8;
      dst[bit / 8] |= static_cast<std::byte>(placed);
      if (bit % 8 + bits > 8) dst[bit / 8 + 1] |= static_cast<std::byte>(placed >> 8);
    }
    return true;
  }

  float valueAt(std::span<const std::byte> src, uint64_t i) const {
    const uint32_t bits = numbers_.bits;
    const uint64_t bit = i * bits;
    uint32_t word = std::to_integer<uint32_t>(src[bit / 8]);
    if (bit % 8 + bits > 8) word |= std::to_integer<uint32_t>(src[bit / 8 + 1]) << 8;
    return scalarValue(numbers_, word >> bit % 8 & ((1u << bits) - 1));
  }

  void checkPayload(std::span<const std::byte> src, uint64_t count) const override {
    expectBytes<WireError>(name(), encodedBytes(count, DType::float32), src.size());
    const uint64_t used = count * numbers_.bits, whole = (used + 7) / 8;
    expectZero(src.subspan(whole), name(), "padding");
    if (used % 8 != 0 && std::to_integer<uint32_t>(src[whole - 1]) >> used % 8 != 0) {
      throw WireError(name() + ": unused bits of the last code's byte: expected 0, got " +
                      std::to_string(std::to_integer<uint32_t>(src[whole - 1]) >> used % 8));
    }
  }

  void decodeTo(void* dst, DType dtype, std::span<const std::byte> src, uint64_t count) const override {
    for (uint64_t i = 0; i < count; ++i)
      setElement(dst, dtype, i, valueAt(src, i));
  }

  void addTo(float* acc, std::span<const std::byte> src, uint64_t count) const override {
    float piece[512];
    for (uint64_t at = 0; at < count; at += std::size(piece)) {
      const uint64_t n = std::min<uint64_t>(std::size(piece), count - at);
      for (uint64_t i = 0; i < n; ++i)
        piece[i] = valueAt(src, at + i);
      reduceInto(acc + at, piece, DType::float32, ReduceKind::sum, n);
    }
  }

  const ScalarTable& numbers_;
};

}  // namespace

std::shared_ptr<const Codec> makeScalarCodec(const CodecSpec& spec, const KernelTable& table) {
  return std::make_shared<ScalarCodec>(spec, table);
}

}  // namespace lowcomm

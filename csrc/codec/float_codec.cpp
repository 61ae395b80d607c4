#include "codec/float_codec.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>

#include "base/error.h"
#include "base/float_env.h"
#include "codec/nonfinite.h"
#include "codec/scalar_rules.h"
#include "kernels/reduce.h"

namespace lowcomm {

FloatCodec::FloatCodec(const CodecSpec& spec, const KernelTable& table)
    : Codec(spec), table_(table), name_(spec.str()) {}

void FloatCodec::checkRun(DType dtype, uint64_t first) const {
  if (!supports(dtype)) {
    throw TypeError(name_ + ": expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
  if (first % granularity() != 0) {
    throw ValueError(
        name_ + ": first element: expected " +
        (granularity() == kUncut ? "0, a whole tensor" : "a multiple of " + std::to_string(granularity())) + ", got " +
        std::to_string(first));
  }
}

bool FloatCodec::begin(std::span<std::byte> dst, DType dtype, uint64_t first, uint64_t count) const {
  checkRun(dtype, first);
  expectBytes<ValueError>(name_, encodedBytes(count, dtype), dst.size());
  return count > 0;
}

void FloatCodec::encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                        const Draws& draws) const {
  if (!begin(dst, dtype, first, count)) return;
  const PhiloxKey key{draws.seed, draws.stream, draws.step};
  if (encodeTaken(dst, src, dtype, first, count, key)) return;
  expectTaken(src, dtype, first, count, "");
  if (spec().nonfinite == Nonfinite::poison && encodePoisoned(dst, src, dtype, first, count, key)) return;
  throw ValueError(name_ + ": expected elements that stay as they are until the op is done, got some that changed");
}

// Rare, so it is a pass of its own over a copy, and the loops know nothing of it.
bool FloatCodec::encodePoisoned(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                                const PhiloxKey& key) const {
  const size_t bytes = count * itemBytes(dtype);
  const auto copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
  std::memcpy(copy.get(), src, bytes);
  const std::vector<uint64_t> poisoned = blankRefused(copy.get(), dtype, count);
  if (!encodeTaken(dst, copy.get(), dtype, first, count, key)) return false;
  for (uint64_t number : poisoned)
    poison(dst, count, number);
  return true;
}

void FloatCodec::decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  FloatEnv env;
  decodeTo(dst, dtype, src, count);
}

void FloatCodec::decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                           uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  FloatEnv env;
  addTo(acc, src, count);
}

void FloatCodec::expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count,
                             const std::string& of) const {
  if (spec().nonfinite == Nonfinite::error) expectFinite(spec(), src, dtype, first, count, of);
}

const float* FloatCodec::floats(const void* src, DType dtype, uint64_t count, std::unique_ptr<float[]>& memory) const {
  if (dtype == DType::float32) return static_cast<const float*>(src);
  memory = std::make_unique_for_overwrite<float[]>(count);
  widening(dtype)(memory.get(), static_cast<const uint16_t*>(src), count);
  return memory.get();
}

// logbyte and log9 (FORMAT.md, "Scalars"): an element's sign and rounded logarithm in 8 or 9 bits, for the few numbers
// of forward-only fine-tuning (Zelikman et al.: Just One Byte (per Gradient); 2023), of which only the order of
// magnitude matters. Relative error at most 6.5 % or 3.2 % within 4e-4...2.6e3; what is beyond becomes the end of the
// range, and NaN or an infinity the code that decodes to NaN.

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

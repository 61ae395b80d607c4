// topk (FORMAT.md, "topk"): the share `keep` of a tensor's elements that is largest in magnitude, their places as a
// bitmap or a list, their values in a grid codec; the others decode to 0. Sparsification as in Aji and Heafield: Sparse
// Communication for Distributed Gradient Descent; EMNLP 2017. A tensor is not cut: which elements are sent depends on
// all of it.
#include "codec/topk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/float_env.h"
#include "codec/float_codec.h"
#include "codec/grid.h"
#include "codec/nonfinite.h"
#include "kernels/select/select.h"

namespace lowcomm {
namespace {

constexpr size_t kHeader = TopkParts::kHeader;

// Checked before memory of that size is asked for; far above any tensor, and exact in a double.
constexpr uint64_t kMost = uint64_t{1} << 48;

// keep·n rounded. Not inlined: the control register must be set before (base/float_env.h), for the size of a payload
// follows from it.
__attribute__((noinline)) uint64_t shareOf(double keep, uint64_t count) {
  return static_cast<uint64_t>(std::floor(keep * static_cast<double>(count) + 0.5));
}

}  // namespace

TopkParts topkParts(const CodecSpec& spec, uint64_t count) {
  if (count == 0) return {};
  if (count > kMost) {
    throw ValueError(spec.str() + ": expected a tensor of at most 2^48 elements, got " + std::to_string(count));
  }
  FloatEnv env;
  const uint64_t k = std::max<uint64_t>(1, std::min(count, shareOf(spec.keep, count)));
  const size_t places = placesBytes(count, k), values = up64(kHeader + places);
  return {count, k, placesListed(count, k), places, values};
}

namespace {

class TopkCodec final : public FloatCodec {
 public:
  TopkCodec(const CodecSpec& spec, const KernelTable& table)
      : FloatCodec(spec, table), values_(valueSpec(spec), table) {}

  uint64_t granularity() const override { return kUncut; }

  size_t encodedBytes(uint64_t count, DType) const override {
    const TopkParts parts = topkParts(spec(), count);
    return parts.values + values_.encodedBytes(parts.k, DType::float32);
  }

 private:
  // The elements that are sent: their places as a bitmap, themselves in order.
  struct Selection {
    explicit Selection(const TopkParts& parts)
        : bitmap(std::make_unique_for_overwrite<uint64_t[]>(bitmapWords(parts.n))),
          values(std::make_unique_for_overwrite<float[]>(parts.k + kSlack)) {}
    std::unique_ptr<uint64_t[]> bitmap;
    std::unique_ptr<float[]> values;
  };

  // The largest elements of src, of which there are parts.n.
  Selection largestOf(const void* src, DType dtype, const TopkParts& parts) const {
    Selection sent(parts);
    FloatEnv env;
    std::unique_ptr<float[]> converted;
    const float* x = floats(src, dtype, parts.n, converted);
    selectLargest(sent.bitmap.get(), sent.values.get(), x, parts.n, parts.k, *table().select);
    return sent;
  }

  // An element that is refused is larger than all that are not: some such element is among the values.
  bool encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t, uint64_t count,
                   const PhiloxKey& key) const override {
    const TopkParts parts = topkParts(spec(), count);
    const Selection sent = largestOf(src, dtype, parts);
    std::memset(dst.data(), 0, parts.values);
    std::memcpy(dst.data(), &parts.k, 8);
    dst[8] = static_cast<std::byte>(spec().values);
    dst[9] = static_cast<std::byte>(spec().value_bits);
    dst[10] = static_cast<std::byte>(parts.listed);
    writePlaces(dst.subspan(kHeader, parts.places), sent.bitmap.get(), count, parts.k);
    try {
      const Draws draws{key.seed, key.stream, key.step};
      values_.encode(dst.subspan(parts.values), sent.values.get(), DType::float32, 0, parts.k, draws);
    } catch (const NonFiniteError&) {
      return false;  // the caller's error names the element's place among all
    }
    return true;
  }

  void checkPayload(std::span<const std::byte> src, uint64_t count) const override {
    expectBytes<WireError>(name(), encodedBytes(count, DType::float32), src.size());
  }

  // Throws WireError for what is no payload.
  Selection read(std::span<const std::byte> src, uint64_t count) const;

  void decodeTo(void* dst, DType dtype, std::span<const std::byte> src, uint64_t count) const override {
    const Selection sent = read(src, count);
    std::memset(dst, 0, count * itemBytes(dtype));
    const float* value = sent.values.get();
    for (size_t word = 0; word < bitmapWords(count); ++word) {
      for (uint64_t bits = sent.bitmap[word]; bits != 0; bits &= bits - 1, ++value)
        setElement(dst, dtype, word * 64 + static_cast<size_t>(std::countr_zero(bits)), *value);
    }
  }

  void addTo(float* acc, std::span<const std::byte> src, uint64_t count) const override {
    const Selection sent = read(src, count);
    addSelected(acc, sent.bitmap.get(), count, sent.values.get());
  }

  GridCodec values_;
};

TopkCodec::Selection TopkCodec::read(std::span<const std::byte> src, uint64_t count) const {
  const TopkParts parts = topkParts(spec(), count);
  uint64_t k;
  std::memcpy(&k, src.data(), 8);
  const auto expect = [&](const char* field, uint64_t expected, uint64_t got) {
    if (expected == got) return;
    throw WireError(name() + ": " + field + ": expected " + std::to_string(expected) + ", got " + std::to_string(got));
  };
  const auto byte = [&](size_t at) { return std::to_integer<uint64_t>(src[at]); };
  expect("k", parts.k, k);
  expect("codec of the values", static_cast<uint64_t>(spec().values), byte(8));
  expect("bits of the values", spec().value_bits, byte(9));
  expect("form", parts.listed, byte(10));
  expectZero(src.subspan(11, kHeader - 11), name(), "rest of the header");
  expectZero(src.subspan(kHeader + parts.places, parts.values - kHeader - parts.places), name(),
             "padding of the places");
  Selection sent(parts);
  readPlaces(sent.bitmap.get(), src.subspan(kHeader, parts.places), parts.n, parts.k, name());
  values_.decode(sent.values.get(), DType::float32, src.subspan(parts.values), 0, parts.k);
  return sent;
}

}  // namespace

std::shared_ptr<const Codec> makeTopkCodec(const CodecSpec& spec, const KernelTable& table) {
  return std::make_shared<TopkCodec>(spec, table);
}

}  // namespace lowcomm

#include "codec/topk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "base/float_env.h"
#include "base/half.h"
#include "codec/nonfinite.h"
#include "codec/payload.h"
#include "codec/places.h"
#include "codec/repair.h"
#include "kernels/finite.h"
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

TopkCodec::TopkCodec(const CodecSpec& spec, const KernelTable& table)
    : Codec(spec), table_(table), name_(spec.str()), values_(valueSpec(spec), table) {}

size_t TopkCodec::encodedBytes(uint64_t count, DType) const {
  const TopkParts parts = topkParts(spec(), count);
  return parts.values + values_.encodedBytes(parts.k, DType::float32);
}

void TopkCodec::checkTensor(DType dtype, uint64_t first) const {
  if (!supports(dtype)) {
    throw TypeError(name_ + ": expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
  if (first != 0) throw ValueError(name_ + ": first element: expected 0, a whole tensor, got " + std::to_string(first));
}

void TopkCodec::encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                       const Draws& draws) const {
  checkTensor(dtype, first);
  const TopkParts parts = topkParts(spec(), count);
  expectBytes<ValueError>(name_, encodedBytes(count, dtype), dst.size());
  if (count == 0) return;
  const auto bitmap = std::make_unique_for_overwrite<uint64_t[]>(bitmapWords(count));
  const auto values = std::make_unique_for_overwrite<float[]>(parts.k + kSlack);
  select(bitmap.get(), values.get(), src, dtype, parts);
  std::memset(dst.data(), 0, parts.values);
  std::memcpy(dst.data(), &parts.k, 8);
  dst[8] = static_cast<std::byte>(spec().values);
  dst[9] = static_cast<std::byte>(spec().value_bits);
  dst[10] = static_cast<std::byte>(parts.listed);
  writePlaces(dst.subspan(kHeader, parts.places), bitmap.get(), count, parts.k);
  try {
    values_.encode(dst.subspan(parts.values), values.get(), DType::float32, 0, parts.k, draws);
  } catch (const NonFiniteError&) {
    expectTaken(src, dtype, first, count, "");  // names the element's place among all
    throw;
  }
}

void TopkCodec::select(uint64_t* bitmap, float* values, const void* src, DType dtype, const TopkParts& parts) const {
  FloatEnv env;
  const float* x = static_cast<const float*>(src);
  std::unique_ptr<float[]> converted;
  if (dtype != DType::float32) {
    converted = std::make_unique_for_overwrite<float[]>(parts.n);
    const auto convert = dtype == DType::float16 ? table_.float16_to_float : table_.bfloat16_to_float;
    convert(converted.get(), static_cast<const uint16_t*>(src), parts.n);
    x = converted.get();
  }
  selectLargest(bitmap, values, x, parts.n, parts.k, *table_.select);
}

// What is refused is larger than what is not: some of it is among the values.
void TopkCodec::expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count, const std::string& of) const {
  if (spec().nonfinite == Nonfinite::error) expectFinite(spec(), src, dtype, first, count, of);
}

bool TopkCodec::needsRepair(const void* src, DType dtype, uint64_t count) const {
  return spec().nonfinite == Nonfinite::saturate && firstNonFinite(src, dtype, count) >= 0;
}

void TopkCodec::repair(void* x, DType dtype, uint64_t count) const {
  const TopkParts parts = topkParts(spec(), count);
  const auto bitmap = std::make_unique_for_overwrite<uint64_t[]>(bitmapWords(count));
  const auto values = std::make_unique_for_overwrite<float[]>(parts.k + kSlack);
  select(bitmap.get(), values.get(), x, dtype, parts);
  const float limit = finiteLimit(spec());
  saturate(values.get(), DType::float32, parts.k, values_.spec().bucket, limit);
  // Back to the places of what was refused; where that was not even among the values, peers have 0.
  uint64_t at = 0, before = 0;  // values of elements before word at / 64
  for (uint64_t e = 0; e < count; ++e) {
    auto* element = static_cast<std::byte*>(x) + e * itemBytes(dtype);
    const int64_t next = firstNonFinite(element, dtype, count - e, limit);
    if (next < 0) return;
    e += static_cast<uint64_t>(next);
    element += static_cast<uint64_t>(next) * itemBytes(dtype);
    for (; at + 64 <= e; at += 64)
      before += static_cast<uint64_t>(std::popcount(bitmap[at / 64]));
    const uint64_t bit = uint64_t{1} << e % 64;
    const bool sent = (bitmap[at / 64] & bit) != 0;
    const float value = sent ? values[before + static_cast<uint64_t>(std::popcount(bitmap[at / 64] & (bit - 1)))] : 0;
    const uint16_t half = dtype == DType::float16 ? floatToFloat16(value) : floatToBfloat16(value);
    std::memcpy(element, dtype == DType::float32 ? static_cast<const void*>(&value) : &half, itemBytes(dtype));
  }
}

void TopkCodec::read(std::span<const std::byte> src, const TopkParts& parts, uint64_t* bitmap, float* values) const {
  uint64_t k;
  std::memcpy(&k, src.data(), 8);
  const auto expect = [&](const char* field, uint64_t expected, uint64_t got) {
    if (expected == got) return;
    throw WireError(name_ + ": " + field + ": expected " + std::to_string(expected) + ", got " + std::to_string(got));
  };
  const auto byte = [&](size_t at) { return std::to_integer<uint64_t>(src[at]); };
  expect("k", parts.k, k);
  expect("codec of the values", static_cast<uint64_t>(spec().values), byte(8));
  expect("bits of the values", spec().value_bits, byte(9));
  expect("form", parts.listed, byte(10));
  expectZero(src.subspan(11, kHeader - 11), name_, "rest of the header");
  expectZero(src.subspan(kHeader + parts.places, parts.values - kHeader - parts.places), name_,
             "padding of the places");
  readPlaces(bitmap, src.subspan(kHeader, parts.places), parts.n, parts.k, name_);
  values_.decode(values, DType::float32, src.subspan(parts.values), 0, parts.k);
}

void TopkCodec::decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const {
  checkTensor(dtype, first);
  const TopkParts parts = topkParts(spec(), count);
  expectBytes<WireError>(name_, encodedBytes(count, dtype), src.size());
  if (count == 0) return;
  const auto bitmap = std::make_unique_for_overwrite<uint64_t[]>(bitmapWords(count));
  const auto values = std::make_unique_for_overwrite<float[]>(parts.k);
  read(src, parts, bitmap.get(), values.get());
  std::memset(dst, 0, count * itemBytes(dtype));
  const float* value = values.get();
  for (size_t word = 0; word < bitmapWords(count); ++word) {
    for (uint64_t bits = bitmap[word]; bits != 0; bits &= bits - 1, ++value) {
      const size_t e = word * 64 + static_cast<size_t>(std::countr_zero(bits));
      if (dtype == DType::float32) {
        static_cast<float*>(dst)[e] = *value;
      } else {
        static_cast<uint16_t*>(dst)[e] = dtype == DType::float16 ? floatToFloat16(*value) : floatToBfloat16(*value);
      }
    }
  }
}

void TopkCodec::decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                          uint64_t count) const {
  checkTensor(dtype, first);
  const TopkParts parts = topkParts(spec(), count);
  expectBytes<WireError>(name_, encodedBytes(count, dtype), src.size());
  if (count == 0) return;
  const auto bitmap = std::make_unique_for_overwrite<uint64_t[]>(bitmapWords(count));
  const auto values = std::make_unique_for_overwrite<float[]>(parts.k);
  read(src, parts, bitmap.get(), values.get());
  FloatEnv env;
  addSelected(acc, bitmap.get(), count, values.get());
}

}  // namespace lowcomm

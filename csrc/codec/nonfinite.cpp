#include "codec/nonfinite.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/narrow_float.h"
#include "kernels/cast/cast_rules.h"
#include "kernels/finite.h"

namespace lowcomm {

void expectFinite(const CodecSpec& codec, const void* x, DType dtype, uint64_t first, uint64_t count,
                  const std::string& of) {
  const float limit = finiteLimit(codec);
  const int64_t bad = firstNonFinite(x, dtype, count, limit);
  if (bad < 0) return;
  const auto at = static_cast<uint64_t>(bad);
  throw NonFiniteError(codec.str(), elementAt(x, dtype, at), first + at, limit, of);
}

namespace {

// Without their sign the bits of floats are in the order of the magnitudes, infinity and NaN above all.
template <typename Bits>
struct Type {
  Bits limit;     // the least magnitude that is refused
  Bits infinity;  // above it: NaN
};
template <typename Bits>
constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;

// Types whose elements of `limit` and more are refused. All finite values of float16 are below every limit.
Type<uint32_t> wideType(float limit) {
  return {std::bit_cast<uint32_t>(limit), 0x7f800000u};
}
Type<uint16_t> halfType(DType dtype, float limit) {
  if (dtype == DType::float16) return {0x7c00, 0x7c00};
  return {static_cast<uint16_t>(std::bit_cast<uint32_t>(limit) >> 16), 0x7f80};
}

// Calls `f(bucket's number, its elements, type)` for every bucket with an element that is refused.
template <typename Bits, typename F>
void eachSpoilt(Bits* x, uint64_t count, uint32_t bucket, Type<Bits> type, F&& f) {
  for (uint64_t at = 0; at < count; at += bucket) {
    const std::span<Bits> of(x + at, std::min<uint64_t>(bucket, count - at));
    const auto refused = [&](Bits bits) { return (bits & kMagnitude<Bits>) >= type.limit; };
    if (std::any_of(of.begin(), of.end(), refused)) f(at / bucket, of, type);
  }
}

template <typename F>
void eachSpoilt(void* x, DType dtype, uint64_t count, uint32_t bucket, float limit, F&& f) {
  if (dtype == DType::float32) return eachSpoilt(static_cast<uint32_t*>(x), count, bucket, wideType(limit), f);
  eachSpoilt(static_cast<uint16_t*>(x), count, bucket, halfType(dtype, limit), f);
}

template <typename Bits>
void saturateBucket(std::span<Bits> x, Type<Bits> type) {
  Bits largest = 0;
  for (Bits bits : x) {
    const Bits magnitude = bits & kMagnitude<Bits>;
    if (magnitude < type.limit) largest = std::max(largest, magnitude);
  }
  for (Bits& bits : x) {
    const Bits magnitude = bits & kMagnitude<Bits>;
    if (magnitude > type.infinity) {
      bits = 0;
    } else if (magnitude >= type.limit) {
      bits = static_cast<Bits>((bits & static_cast<Bits>(~kMagnitude<Bits>)) | largest);
    }
  }
}

}  // namespace

void saturate(void* x, DType dtype, uint64_t count, uint32_t bucket, float limit) {
  eachSpoilt(x, dtype, count, bucket, limit, [](uint64_t, auto of, auto type) { saturateBucket(of, type); });
}

std::vector<uint64_t> blank(void* x, DType dtype, uint64_t count, uint32_t bucket, float limit) {
  std::vector<uint64_t> spoilt;
  eachSpoilt(x, dtype, count, bucket, limit, [&](uint64_t number, auto of, auto) {
    std::fill(of.begin(), of.end(), 0);
    spoilt.push_back(number);
  });
  return spoilt;
}

namespace {

// Calls `f(channel's number, its elements, type)` for every channel with an element that is refused; what `f` makes of
// the elements goes back to their places.
template <typename Bits, typename F>
void eachSpoiltChannel(Bits* x, uint64_t count, uint32_t channels, Type<Bits> type, F&& f) {
  std::vector<bool> spoilt(channels, false);
  for (uint64_t e = 0; e < count; ++e) {
    if ((x[e] & kMagnitude<Bits>) >= type.limit) spoilt[e % channels] = true;
  }
  std::vector<Bits> of(count / channels);
  for (uint64_t c = 0; c < channels; ++c) {
    if (!spoilt[c]) continue;
    for (uint64_t t = 0; t < of.size(); ++t)
      of[t] = x[t * channels + c];
    f(c, std::span<Bits>(of), type);
    for (uint64_t t = 0; t < of.size(); ++t)
      x[t * channels + c] = of[t];
  }
}

template <typename F>
void eachSpoiltChannel(void* x, DType dtype, uint64_t count, uint32_t channels, F&& f) {
  if (dtype == DType::float32)
    return eachSpoiltChannel(static_cast<uint32_t*>(x), count, channels, wideType(kFiniteLimit), f);
  eachSpoiltChannel(static_cast<uint16_t*>(x), count, channels, halfType(dtype, kFiniteLimit), f);
}

}  // namespace

void saturateChannels(void* x, DType dtype, uint64_t count, uint32_t channels) {
  eachSpoiltChannel(x, dtype, count, channels, [](uint64_t, auto of, auto type) { saturateBucket(of, type); });
}

std::vector<uint64_t> blankChannels(void* x, DType dtype, uint64_t count, uint32_t channels) {
  std::vector<uint64_t> spoilt;
  eachSpoiltChannel(x, dtype, count, channels, [&](uint64_t number, auto of, auto) {
    std::fill(of.begin(), of.end(), 0);
    spoilt.push_back(number);
  });
  return spoilt;
}

namespace {

// Calls `f(element's number, element, infinity's bits)` for every NaN and infinity.
template <typename Bits, typename F>
void eachSpecial(Bits* x, uint64_t count, Bits infinity, F&& f) {
  for (uint64_t i = 0; i < count; ++i) {
    if ((x[i] & kMagnitude<Bits>) >= infinity) f(i, x[i], infinity);
  }
}

template <typename F>
void eachSpecial(void* x, DType dtype, uint64_t count, F&& f) {
  if (dtype == DType::float32) return eachSpecial(static_cast<uint32_t*>(x), count, wideType(kFiniteLimit).infinity, f);
  eachSpecial(static_cast<uint16_t*>(x), count, halfType(dtype, kFiniteLimit).infinity, f);
}

}  // namespace

void saturateEach(void* x, DType dtype, uint64_t count) {
  eachSpecial(x, dtype, count, [](uint64_t, auto& bits, auto infinity) { bits = saturatedBits(bits, infinity); });
}

std::vector<uint64_t> blankEach(void* x, DType dtype, uint64_t count) {
  std::vector<uint64_t> found;
  eachSpecial(x, dtype, count, [&](uint64_t i, auto& bits, auto) {
    bits = 0;
    found.push_back(i);
  });
  return found;
}

void clearCodes(std::span<std::byte> words, int bits, uint64_t from, uint64_t count) {
  const uint64_t width = static_cast<uint64_t>(bits);
  for (uint64_t e = from; e < from + count; ++e) {
    const uint64_t lane = e % 16, row = e % 512 / 16;
    std::byte* block = words.data() + e / 512 * 64 * width;
    for (uint64_t bit = row * width; bit < (row + 1) * width; ++bit)
      block[(bit / 32 * 16 + lane) * 4 + bit % 32 / 8] &= ~(std::byte{1} << bit % 8);
  }
}

}  // namespace lowcomm

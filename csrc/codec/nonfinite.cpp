#include "codec/nonfinite.h"

#include <bit>

#include "base/narrow_float.h"
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
bool isRefused(Bits bits, Bits limit) {
  return (bits & static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1)) >= limit;
}

// Calls use(x as integers, the bits of the least magnitude that is refused). All finite values of float16 are below
// every limit.
template <typename Use>
void asBits(void* x, DType dtype, float limit, const Use& use) {
  const uint32_t bits = std::bit_cast<uint32_t>(limit);
  if (dtype == DType::float32) return use(static_cast<uint32_t*>(x), bits);
  use(static_cast<uint16_t*>(x), dtype == DType::float16 ? uint16_t{0x7c00} : static_cast<uint16_t>(bits >> 16));
}

}  // namespace

std::vector<uint64_t> blank(void* x, DType dtype, uint64_t count, uint32_t bucket, float limit) {
  std::vector<uint64_t> refused;
  asBits(x, dtype, limit, [&](auto* elements, auto least) {
    for (uint64_t at = 0; at < count; at += bucket) {
      const std::span of(elements + at, std::min<uint64_t>(bucket, count - at));
      if (std::none_of(of.begin(), of.end(), [&](auto bits) { return isRefused(bits, least); })) continue;
      std::fill(of.begin(), of.end(), 0);
      refused.push_back(at / bucket);
    }
  });
  return refused;
}

std::vector<uint64_t> blankChannels(void* x, DType dtype, uint64_t count, uint32_t channels) {
  std::vector<bool> holds(channels, false);  // an element that is refused
  asBits(x, dtype, kFiniteLimit, [&](auto* elements, auto least) {
    for (uint64_t e = 0; e < count; ++e) {
      if (isRefused(elements[e], least)) holds[e % channels] = true;
    }
    for (uint64_t e = 0; e < count; ++e) {
      if (holds[e % channels]) elements[e] = 0;
    }
  });
  std::vector<uint64_t> refused;
  for (uint64_t c = 0; c < channels; ++c) {
    if (holds[c]) refused.push_back(c);
  }
  return refused;
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

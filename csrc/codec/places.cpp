#include "codec/topk.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"

namespace lowcomm {
namespace {

constexpr uint64_t kBlock = 65536;

uint64_t blocksOf(uint64_t n) {
  return (n + kBlock - 1) / kBlock;
}

size_t bitmapBytes(uint64_t n) {
  return (n + 7) / 8;
}

size_t listBytes(uint64_t n, uint64_t k) {
  return 4 * blocksOf(n) + 2 * k;
}

[[noreturn]] void fail(const std::string& codec, const std::string& what, uint64_t expected, uint64_t got) {
  throw WireError(codec + ": " + what + std::to_string(expected) + ", got " + std::to_string(got));
}

void readBitmap(uint64_t* bitmap, std::span<const std::byte> from, uint64_t n, uint64_t k, const std::string& codec) {
  bitmap[bitmapWords(n) - 1] = 0;  // of which not all bytes may be there
  std::memcpy(bitmap, from.data(), from.size());
  if (n % 64 != 0 && bitmap[n / 64] >> (n % 64) != 0) {
    fail(codec, "bitmap: bits past the last element: expected ", 0, bitmap[n / 64] >> (n % 64));
  }
  uint64_t found = 0;
  for (size_t word = 0; word < bitmapWords(n); ++word)
    found += static_cast<uint64_t>(std::popcount(bitmap[word]));
  if (found != k) fail(codec, "bitmap: elements: expected ", k, found);
}

void readList(uint64_t* bitmap, std::span<const std::byte> from, uint64_t n, uint64_t k, const std::string& codec) {
  std::fill(bitmap, bitmap + bitmapWords(n), 0);
  const std::byte* counts = from.data();
  const std::byte* places = counts + 4 * blocksOf(n);
  uint64_t left = k;
  for (uint64_t block = 0; block < blocksOf(n); ++block) {
    const std::string of_block = " of block " + std::to_string(block) + ": expected ";
    const uint64_t size = std::min(kBlock, n - block * kBlock);
    uint32_t count;
    std::memcpy(&count, counts + 4 * block, 4);
    if (count > left) fail(codec, "places: count" + of_block + "at most ", left, count);
    left -= count;
    uint64_t least = 0;  // that the next place may be
    for (uint32_t i = 0; i < count; ++i, places += 2) {
      uint16_t place;
      std::memcpy(&place, places, 2);
      if (place < least) fail(codec, "places" + of_block + "ascending ones, at least ", least, place);
      if (place >= size) fail(codec, "places" + of_block + "below ", size, place);
      least = uint64_t{place} + 1;
      const uint64_t e = block * kBlock + place;
      bitmap[e / 64] |= uint64_t{1} << e % 64;
    }
  }
  if (left != 0) fail(codec, "places: elements: expected ", k, k - left);
}

}  // namespace

bool placesListed(uint64_t n, uint64_t k) {
  return listBytes(n, k) < bitmapBytes(n);
}

size_t placesBytes(uint64_t n, uint64_t k) {
  return std::min(listBytes(n, k), bitmapBytes(n));
}

void writePlaces(std::span<std::byte> to, const uint64_t* bitmap, uint64_t n, uint64_t k) {
  if (!placesListed(n, k)) {
    std::memcpy(to.data(), bitmap, to.size());
    return;
  }
  std::byte* places = to.data() + 4 * blocksOf(n);
  for (uint64_t block = 0; block < blocksOf(n); ++block) {
    uint32_t count = 0;
    const uint64_t first = block * (kBlock / 64), end = std::min<uint64_t>(first + kBlock / 64, bitmapWords(n));
    for (uint64_t word = first; word < end; ++word) {
      for (uint64_t bits = bitmap[word]; bits != 0; bits &= bits - 1, ++count, places += 2) {
        const auto place = static_cast<uint16_t>((word - first) * 64 + static_cast<uint64_t>(std::countr_zero(bits)));
        std::memcpy(places, &place, 2);
      }
    }
    std::memcpy(to.data() + 4 * block, &count, 4);
  }
}

void readPlaces(uint64_t* bitmap, std::span<const std::byte> from, uint64_t n, uint64_t k, const std::string& codec) {
  if (placesListed(n, k)) {
    readList(bitmap, from, n, k, codec);
  } else {
    readBitmap(bitmap, from, n, k, codec);
  }
}

void writeChunkPlaces(std::byte* to, const uint16_t* places, size_t k, int low_bits) {
  std::memset(to, 0, chunkPlacesBytes(k, low_bits));
  for (size_t i = 0; i < k; ++i) {
    const size_t bit = (static_cast<size_t>(places[i]) >> low_bits) + i;
    to[bit / 8] |= std::byte{1} << bit % 8;
  }
  to += (2 * k + 7) / 8;
  uint64_t waiting = 0;
  int bits = 0;
  for (size_t i = 0; i < k; ++i) {
    waiting |= (uint64_t{places[i]} & ((1u << low_bits) - 1)) << bits;
    for (bits += low_bits; bits >= 8; bits -= 8, waiting >>= 8)
      *to++ = static_cast<std::byte>(waiting);
  }
  if (bits > 0) *to = static_cast<std::byte>(waiting);
}

void readChunkPlaces(uint16_t* places, const std::byte* from, size_t k, int low_bits, size_t n,
                     const std::string& codec, uint64_t chunk) {
  const auto refuse = [&](const std::string& expected, uint64_t limit, uint64_t got) {
    fail(codec, "places of chunk " + std::to_string(chunk) + ": expected " + expected, limit, got);
  };
  const size_t unary = (2 * k + 7) / 8;
  size_t found = 0, last = 0;
  for (size_t at = 0; at < unary; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, from + at, std::min<size_t>(8, unary - at));
    for (; word != 0; word &= word - 1, ++found) {
      last = at * 8 + static_cast<size_t>(std::countr_zero(word));
      if (found < k) places[found] = static_cast<uint16_t>((last - found) << low_bits);
    }
  }
  if (found != k) refuse("", k, found);
  if (last > 2 * k - 2) refuse("below ", n, (last - (k - 1)) << low_bits);  // all others are less

  const std::byte* lows = from + unary;
  const size_t width = static_cast<size_t>(low_bits), used = k * width;
  uint32_t least = 0;  // that the next place may be
  for (size_t i = 0; i < k; ++i) {
    uint32_t word;
    std::memcpy(&word, lows + i * width / 8, 4);
    const uint32_t place = places[i] | (word >> i * width % 8 & ((1u << low_bits) - 1));
    if (place < least) refuse("ascending ones, at least ", least, place);
    least = place + 1;
    places[i] = static_cast<uint16_t>(place);
  }
  if (least > n) refuse("below ", n, least - 1);
  const auto unused = used % 8 == 0 ? 0 : std::to_integer<uint64_t>(lows[used / 8]) >> used % 8;
  if (unused != 0) refuse("unused bits of ", 0, unused);
}

}  // namespace lowcomm

// The crc32 instruction takes a new operand every cycle but needs three for its result: three streams side by side,
// their results joined by moving a CRC over the bytes that follow it. No STL inline code here (lanes.inl says
// why).
#include <cstddef>
#include <cstdint>

#include "base/crc32c.h"

#if defined(__SSE4_2__) && defined(__x86_64__)
#include <nmmintrin.h>

namespace lowcomm {
namespace {

// Appending n zero bytes is linear in the CRC register: the register after them is the XOR of what each of its bits
// becomes. Held as one look-up a byte of the register.
struct ZerosTable {
  uint32_t value[4][256];
};

constexpr ZerosTable zerosTable(size_t bytes) {
  uint32_t column[32] = {};  // what bit i becomes
  for (int i = 0; i < 32; ++i)
    column[i] = uint32_t{1} << i;
  uint32_t power[32] = {};  // one zero byte, then 2, 4, 8, ...
  for (int i = 0; i < 32; ++i) {
    uint32_t crc = uint32_t{1} << i;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    power[i] = crc;
  }
  for (; bytes > 0; bytes >>= 1) {
    uint32_t squared[32] = {}, moved[32] = {};
    for (int i = 0; i < 32; ++i) {
      for (int j = 0; j < 32; ++j) {
        if (power[i] >> j & 1) squared[i] ^= power[j];
        if (column[i] >> j & 1) moved[i] ^= power[j];
      }
    }
    for (int i = 0; i < 32; ++i) {
      if (bytes & 1) column[i] = moved[i];
      power[i] = squared[i];
    }
  }
  ZerosTable table{};
  for (int byte = 0; byte < 4; ++byte) {
    for (uint32_t v = 0; v < 256; ++v) {
      for (int bit = 0; bit < 8; ++bit) {
        if (v >> bit & 1) table.value[byte][v] ^= column[8 * byte + bit];
      }
    }
  }
  return table;
}

constexpr size_t kLong = 4096;
constexpr size_t kShort = 256;
constexpr ZerosTable kLongZeros = zerosTable(kLong);
constexpr ZerosTable kShortZeros = zerosTable(kShort);

inline uint32_t appendZeros(const ZerosTable& table, uint32_t crc) {
  return table.value[0][crc & 255] ^ table.value[1][crc >> 8 & 255] ^ table.value[2][crc >> 16 & 255] ^
         table.value[3][crc >> 24];
}

inline uint64_t word(const unsigned char* p) {
  uint64_t value;
  __builtin_memcpy(&value, p, 8);
  return value;
}

template <size_t kStream>
inline uint32_t threeStreams(const unsigned char*& p, size_t& size, uint32_t crc, const ZerosTable& zeros) {
  for (; size >= 3 * kStream; size -= 3 * kStream, p += 3 * kStream) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, word(p + i));
      b = _mm_crc32_u64(b, word(p + kStream + i));
      c = _mm_crc32_u64(c, word(p + 2 * kStream + i));
    }
    crc = appendZeros(zeros, static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
    crc = appendZeros(zeros, crc) ^ static_cast<uint32_t>(c);
  }
  return crc;
}

}  // namespace

uint32_t crc32cSse42(const void* data, size_t size, uint32_t before) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  crc = threeStreams<kLong>(p, size, crc, kLongZeros);
  crc = threeStreams<kShort>(p, size, crc, kShortZeros);
  uint64_t tail = crc;
  for (; size >= 8; size -= 8, p += 8)
    tail = _mm_crc32_u64(tail, word(p));
  crc = static_cast<uint32_t>(tail);
  for (; size > 0; --size, ++p)
    crc = _mm_crc32_u8(crc, *p);
  return ~crc;
}

}  // namespace lowcomm

#else

namespace lowcomm {
uint32_t crc32cSse42(const void* data, size_t size, uint32_t before) {
  return crc32cTable(data, size, before);
}
}  // namespace lowcomm

#endif

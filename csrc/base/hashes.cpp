#include "base/hashes.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace lowcomm {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // 0x1EDC6F41, bit-reversed

// table[k][v]: the CRC register after byte v and k zero bytes, so that eight bytes are eight independent look-ups.
constexpr auto makeTables() {
  std::array<std::array<uint32_t, 256>, 8> table{};
  for (uint32_t v = 0; v < 256; ++v) {
    uint32_t crc = v;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    table[0][v] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t v = 0; v < 256; ++v)
      table[k][v] = (table[k - 1][v] >> 8) ^ table[0][table[k - 1][v] & 255];
  }
  return table;
}

constexpr auto kTables = makeTables();

inline uint64_t wordAt(const unsigned char* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

}  // namespace

uint32_t crc32cTable(const void* data, size_t size, uint32_t before) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, p += 8) {
    const uint64_t word = wordAt(p) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k)
      crc ^= kTables[7 - k][(word >> (8 * k)) & 255];
  }
  for (; size > 0; --size, ++p)
    crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 255];
  return ~crc;
}

#if defined(__x86_64__)

// The crc32 instruction takes a new operand every cycle but needs three for its result: three streams side by side,
// their results joined by moving a CRC over the bytes that follow it.
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
      crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
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

template <size_t kStream>
[[gnu::target("sse4.2")]] inline uint32_t threeStreams(const unsigned char*& p, size_t& size, uint32_t crc,
                                                       const ZerosTable& zeros) {
  for (; size >= 3 * kStream; size -= 3 * kStream, p += 3 * kStream) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, wordAt(p + i));
      b = _mm_crc32_u64(b, wordAt(p + kStream + i));
      c = _mm_crc32_u64(c, wordAt(p + 2 * kStream + i));
    }
    crc = appendZeros(zeros, static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
    crc = appendZeros(zeros, crc) ^ static_cast<uint32_t>(c);
  }
  return crc;
}

}  // namespace

[[gnu::target("sse4.2")]] uint32_t crc32cSse42(const void* data, size_t size, uint32_t before) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  crc = threeStreams<kLong>(p, size, crc, kLongZeros);
  crc = threeStreams<kShort>(p, size, crc, kShortZeros);
  uint64_t tail = crc;
  for (; size >= 8; size -= 8, p += 8)
    tail = _mm_crc32_u64(tail, wordAt(p));
  crc = static_cast<uint32_t>(tail);
  for (; size > 0; --size, ++p)
    crc = _mm_crc32_u8(crc, *p);
  return ~crc;
}

#else

uint32_t crc32cSse42(const void* data, size_t size, uint32_t before) {
  return crc32cTable(data, size, before);
}

#endif

bool crc32cHasSse42() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#else
  return false;
#endif
}

uint32_t crc32c(const void* data, size_t size, uint32_t before) {
  static const auto kForm = crc32cHasSse42() ? crc32cSse42 : crc32cTable;
  return kForm(data, size, before);
}

}  // namespace lowcomm

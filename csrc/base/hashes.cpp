#include "base/hashes.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lowcomm {

namespace {

// table[k][v]: the CRC register after byte v and k zero bytes, so that eight bytes are eight independent look-ups.
constexpr auto makeTables() {
  std::array<std::array<uint32_t, 256>, 8> table{};
  for (uint32_t v = 0; v < 256; ++v) {
    uint32_t crc = v;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ (crc & 1 ? kCrcPolynomial : 0);
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
      crc = (crc >> 1) ^ (crc & 1 ? kCrcPolynomial : 0);
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

// Products without carries (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", 2009): 16
// bytes may be replaced by a sum of products that is congruent to them, and be added to others that come later. Four
// times four streams of 16 bytes are folded so.
namespace {

// For polynomials that are moved on by so many bits. A product of two bit-reversed words is moved by one bit already.
struct Moved {
  uint64_t first, second;  // of the first eight bytes of 16, and of the last
};

constexpr Moved movedBy(uint64_t bits) {
  return {uint64_t{crcPower(bits + 63)} << 32, uint64_t{crcPower(bits - 1)} << 32};
}

constexpr Moved kBy2048 = movedBy(2048), kBy512 = movedBy(512), kBy128 = movedBy(128);
constexpr size_t kFolds = 256;  // bytes at once

[[gnu::target("avx512f,vpclmulqdq")]] inline __m512i fold(__m512i sum, __m512i next, const Moved& by) {
  const __m512i k = _mm512_set4_epi64(static_cast<int64_t>(by.second), static_cast<int64_t>(by.first),
                                      static_cast<int64_t>(by.second), static_cast<int64_t>(by.first));
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, k, 0x00), _mm512_clmulepi64_epi128(sum, k, 0x11), next,
                                   0x96);  // all three added
}

[[gnu::target("avx512f,vpclmulqdq,pclmul,sse4.2")]] inline __m128i fold(__m128i sum, __m128i next) {
  const __m128i k = _mm_set_epi64x(static_cast<int64_t>(kBy128.second), static_cast<int64_t>(kBy128.first));
  const __m128i moved = _mm_xor_si128(_mm_clmulepi64_si128(sum, k, 0x00), _mm_clmulepi64_si128(sum, k, 0x11));
  return _mm_xor_si128(moved, next);
}

}  // namespace

[[gnu::target("avx512f,vpclmulqdq,pclmul,sse4.2")]] uint32_t crc32cAvx512(const void* data, size_t size,
                                                                          uint32_t before) {
  if (size < 2 * kFolds) return crc32cSse42(data, size, before);
  const auto* p = static_cast<const unsigned char*>(data);
  __m512i sums[4];
  for (int i = 0; i < 4; ++i)
    sums[i] = _mm512_loadu_si512(p + 64 * i);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~before))));
  for (p += kFolds, size -= kFolds; size >= kFolds; p += kFolds, size -= kFolds) {
    for (int i = 0; i < 4; ++i)
      sums[i] = fold(sums[i], _mm512_loadu_si512(p + 64 * i), kBy2048);
  }
  __m512i sum = sums[0];
  for (int i = 1; i < 4; ++i)
    sum = fold(sum, sums[i], kBy512);
  __m128i last = _mm512_extracti32x4_epi32(sum, 0);
  last = fold(last, _mm512_extracti32x4_epi32(sum, 1));
  last = fold(last, _mm512_extracti32x4_epi32(sum, 2));
  last = fold(last, _mm512_extracti32x4_epi32(sum, 3));
  uint64_t crc = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(last)));
  crc = _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(last, 1)));
  return crc32cSse42(p, size, ~static_cast<uint32_t>(crc));
}

#else

uint32_t crc32cAvx512(const void* data, size_t size, uint32_t before) {
  return crc32cTable(data, size, before);
}

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

bool crc32cHasAvx512() {
#if defined(__x86_64__)
  return crc32cHasSse42() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") &&
         __builtin_cpu_supports("pclmul");
#else
  return false;
#endif
}

uint32_t crc32c(const void* data, size_t size, uint32_t before) {
  static const auto kForm = crc32cHasAvx512() ? crc32cAvx512 : crc32cHasSse42() ? crc32cSse42 : crc32cTable;
  return kForm(data, size, before);
}

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace lowcomm {

// CRC-32C (Castagnoli, RFC 3720 B.4) of `size` bytes; `before` is the CRC of the bytes that precede them, 0 at the
// start: crc32c(b, m, crc32c(a, n)) is the CRC of a followed by b. Picks the fastest form of this machine.
uint32_t crc32c(const void* data, size_t size, uint32_t before = 0);

// The forms behind it, of equal value. The last two may be called only where the function of that name is true.
uint32_t crc32cTable(const void* data, size_t size, uint32_t before);
uint32_t crc32cSse42(const void* data, size_t size, uint32_t before);
uint32_t crc32cAvx512(const void* data, size_t size, uint32_t before);
bool crc32cHasSse42();
bool crc32cHasAvx512();  // and VPCLMULQDQ

inline constexpr uint32_t kCrcPolynomial = 0x82f63b78u;  // 0x1EDC6F41, bit-reversed: bit 31 is the coefficient of x^0
inline constexpr uint32_t kCrcOne = uint32_t{1} << 31;   // the polynomial 1

// The product of two polynomials over GF(2), modulo the CRC's.
constexpr uint32_t crcProduct(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t bit = kCrcOne; bit != 0; bit >>= 1) {
    if (a & bit) sum ^= b;
    b = (b >> 1) ^ (b & 1 ? kCrcPolynomial : 0);  // times x
  }
  return sum;
}

// x^n, modulo the CRC's polynomial.
constexpr uint32_t crcPower(uint64_t n) {
  uint32_t result = kCrcOne;
  for (uint32_t power = kCrcOne >> 1; n > 0; n >>= 1, power = crcProduct(power, power)) {
    if (n & 1) result = crcProduct(result, power);
  }
  return result;
}

// CRC-32C of a byte string and a second one behind it, of the CRC of each and the second one's length: as crc32c
// of both together. The time grows with the logarithm of the length.
constexpr uint32_t joinedCrc32c(uint32_t first, uint32_t second, uint64_t second_bytes) {
  // A zero byte multiplies the register by x^8, and the register is linear in what came before.
  return crcProduct(crcPower(8 * second_bytes), first) ^ second;
}

// 64-bit FNV-1a, part of the format (FORMAT.md, "Layouts", "Descriptions"). It tells texts apart that differ by
// mistake, not by intent.
constexpr uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : text)
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace lowcomm

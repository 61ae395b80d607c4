#include "base/crc32c.h"

#include <array>
#include <cstring>

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

}  // namespace

uint32_t crc32cTable(const void* data, size_t size, uint32_t before) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k)
      crc ^= kTables[7 - k][(word >> (8 * k)) & 255];
  }
  for (; size > 0; --size, ++p)
    crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 255];
  return ~crc;
}

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

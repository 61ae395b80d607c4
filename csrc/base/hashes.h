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

// 64-bit FNV-1a, part of the format (FORMAT.md, "Layouts", "Descriptions"). It tells texts apart that differ by
// mistake, not by intent.
constexpr uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : text)
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace lowcomm

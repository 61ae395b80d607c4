#pragma once

#include <cstdint>

namespace lowcomm {

// CRC-32C of a byte string and a second one behind it, of the CRC of each and the second one's length: as crc32c
// (base/hashes.h) of both together. The time grows with the logarithm of the length.
uint32_t joinedCrc32c(uint32_t first, uint32_t second, uint64_t second_bytes);

}  // namespace lowcomm

#include "base/joined_crc.h"

namespace lowcomm {

uint32_t joinedCrc32c(uint32_t first, uint32_t second, uint64_t second_bytes) {
  // A zero byte multiplies the register by x^8, and the register is linear in what came before.
  return crcProduct(crcPower(8 * second_bytes), first) ^ second;
}

}  // namespace lowcomm

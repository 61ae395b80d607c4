#include "base/joined_crc.h"

namespace lowcomm {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // 0x1EDC6F41, bit-reversed: bit 31 is the coefficient of x^0
constexpr uint32_t kOne = uint32_t{1} << 31;

// The product of two polynomials over GF(2), modulo the CRC's.
uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) sum ^= b;
    b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);  // times x
  }
  return sum;
}

}  // namespace

uint32_t joinedCrc32c(uint32_t first, uint32_t second, uint64_t second_bytes) {
  // A zero byte multiplies the register by x^8, and the register is linear in what came before.
  uint32_t shift = kOne, power = kOne >> 8;
  for (; second_bytes > 0; second_bytes >>= 1, power = product(power, power)) {
    if (second_bytes & 1) shift = product(shift, power);
  }
  return product(shift, first) ^ second;
}

}  // namespace lowcomm

#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lowcomm::test {

// SHA-256 (FIPS 180-4) in lower-case hexadecimal: golden files hold hashes of payloads.
inline std::string sha256(std::span<const std::byte> message) {
  // The constants are the first 32 fraction bits of cube and square roots of the first primes: derived, not listed.
  const auto fraction = [](long double root) {
    return static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0L);
  };
  std::vector<uint32_t> primes;
  for (uint32_t n = 2; primes.size() < 64; ++n) {
    bool prime = true;
    for (uint32_t p : primes)
      prime &= n % p != 0;
    if (prime) primes.push_back(n);
  }
  uint32_t k[64], state[8];
  for (size_t i = 0; i < 64; ++i)
    k[i] = fraction(std::cbrt(static_cast<long double>(primes[i])));
  for (size_t i = 0; i < 8; ++i)
    state[i] = fraction(std::sqrt(static_cast<long double>(primes[i])));

  std::vector<uint8_t> bytes;
  for (std::byte b : message)
    bytes.push_back(std::to_integer<uint8_t>(b));
  bytes.push_back(0x80);
  while (bytes.size() % 64 != 56)
    bytes.push_back(0);
  for (int i = 7; i >= 0; --i)
    bytes.push_back(static_cast<uint8_t>(uint64_t{message.size()} * 8 >> (8 * i)));

  for (size_t at = 0; at < bytes.size(); at += 64) {
    uint32_t w[64];
    for (size_t i = 0; i < 16; ++i) {
      w[i] = 0;
      for (size_t j = 0; j < 4; ++j)
        w[i] = w[i] << 8 | bytes[at + 4 * i + j];
    }
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + k[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const uint32_t out[8] = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i)
      state[i] += out[i];
  }
  std::string hex;
  for (uint32_t word : state) {
    for (int nibble = 7; nibble >= 0; --nibble)
      hex += "0123456789abcdef"[word >> (4 * nibble) & 15];
  }
  return hex;
}

}  // namespace lowcomm::test

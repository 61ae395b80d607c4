#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace lowcomm {

// The part of a draw's identity that is the same for every element of an encode. FORMAT.md, "Randomness".
struct PhiloxKey {
  uint64_t seed = 0;
  uint32_t stream = 0;
  uint32_t step = 0;
};

inline constexpr uint32_t kPhiloxMul0 = 0xD2511F53u;
inline constexpr uint32_t kPhiloxMul1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 10;

// Draws of a bucket rather than of an element: the counter is the bucket's number, in a stream of their own.
inline constexpr uint32_t kBucketStream = 1u << 31;

struct PhiloxWords {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011). Counter words 0 and
// 1 are the low and high half of `counter`, 2 is the stream, 3 the step; the key words are the low and high half of the
// seed.
LOWCOMM_HOST_DEVICE inline PhiloxWords philox(uint64_t counter, const PhiloxKey& key) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = key.stream, c3 = key.step;
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxMul0} * c0;
    const uint64_t p1 = uint64_t{kPhiloxMul1} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace lowcomm

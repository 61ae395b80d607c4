#pragma once

#include <cmath>
#include <cstring>

#include "grid_cases.h"

// Laws that several families of grid codecs obey.
namespace lowcomm::test {

// A payload depends on the seed, stream and step of the draws and on the place of the elements, and on nothing else.
inline void expectDrawsMatter(const GridCodec& c) {
  const std::vector<float> x = normal(4096, 1);
  const Bytes payload = encoded(c, x, {1, 2, 3});
  EXPECT_EQ(payload, encoded(c, x, {1, 2, 3}));
  EXPECT_NE(payload, encoded(c, x, {1ull << 32 | 1, 2, 3}));
  EXPECT_NE(payload, encoded(c, x, {1, 3, 3}));
  EXPECT_NE(payload, encoded(c, x, {1, 2, 4}));
  EXPECT_NE(payload, encoded(c, x, {1, 2, 3}, 512));
}

// Every bit of a good payload's codes that carries nothing is refused when it is flipped; `carrying` bits are accepted.
// So are bytes between the metadata and the codes, and metadata that are not finite. `item`: bytes of a bucket's
// metadata.
inline void expectIdleBitsAreRefused(const GridCodec& c, const Bytes& good, size_t n, size_t item, uint64_t carrying) {
  const size_t meta = item * ((n + c.spec().bucket - 1) / c.spec().bucket), words = (meta + 63) / 64 * 64;
  std::vector<float> y(n);
  uint64_t accepted = 0;
  for (size_t bit = 0; bit < (good.size() - words) * 8; ++bit) {
    Bytes changed = good;
    changed[words + bit / 8] ^= std::byte(1 << bit % 8);
    try {
      c.decode(y.data(), DType::float32, changed, 0, n);
      ++accepted;
    } catch (const WireError&) {
    }
  }
  EXPECT_EQ(accepted, carrying) << c.spec().str() << " " << n;
  for (size_t at = meta; at < words; ++at) {
    Bytes changed = good;
    changed[at] = std::byte{1};
    EXPECT_THROW(c.decode(y.data(), DType::float32, changed, 0, n), WireError);
  }
  for (size_t at = 0; at < meta; at += 4) {
    for (float value : {NAN, INFINITY, -INFINITY}) {
      Bytes changed = good;
      std::memcpy(changed.data() + at, &value, 4);
      EXPECT_THROW(c.decodeAdd(y.data(), DType::float32, changed, 0, n), WireError);
    }
  }
}

}  // namespace lowcomm::test

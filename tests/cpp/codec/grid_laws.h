#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "grid_cases.h"

// Laws that several families of grid codecs obey.
namespace lowcomm::test {

using Texts = std::vector<std::string>;

inline const Texts kRotated = {"minmax4:rotate=1",
                               "minmax8:bucket=512,meta=bf16,rotate=1",
                               "qsgd4:bucket=512,meta=bf16,rotate=1",
                               "qsgd3:bucket=4096,rotate=1",
                               "lattice4:rotate=1",
                               "sym4:bucket=512,rotate=1",
                               "sym2:bucket=2048,range=l2,rotate=1",
                               "mid3:bucket=512,meta=bf16,rotate=1",
                               "sign1:rotate=1",
                               "gauss1",
                               "gauss2",
                               "gauss3:bucket=1024",
                               "gauss4:meta=fp32",
                               "gauss5",
                               "gauss6:bucket=4096",
                               "gauss7:meta=fp32",
                               "gauss8:bucket=65536",
                               "gauss8:gain=1.25"};

// Codecs of units, without their unit, and the units that laws are tested with.
inline const Texts kUnitTexts = {"gauss2",
                                 "gauss4",
                                 "gauss8:bucket=1024,meta=fp32",
                                 "minmax4:bucket=64",
                                 "minmax8:bucket=128",
                                 "minmax3",
                                 "minmax4:bucket=512,meta=bf16,rotate=1",
                                 "qsgd4:bucket=256",
                                 "lattice4:bucket=64",
                                 "sym4",
                                 "sym2:bucket=64,range=l2",
                                 "mid3:bucket=128,meta=bf16",
                                 "sign1:bucket=64"};
inline constexpr uint64_t kUnitSizes[] = {1, 3, 16, 17, 40, 64, 100, 300, 512, 576, 768, 896, 1000, 1024, 1600, 2100};

inline std::string withUnit(const std::string& text, uint64_t unit) {
  return withOption(text, "unit=" + std::to_string(unit));
}

// edgeSizes(), and those about rows and blocks.
inline std::vector<size_t> manySizes(size_t bucket) {
  std::vector<size_t> sizes = edgeSizes(bucket);
  sizes.insert(sizes.end(), {2, 14, 31, 32, 520, 527, 528, 1023, 2047, 2048, 2049, 5000});
  return sizes;
}

// Channels of very different sizes, as activations have them.
inline std::vector<float> spread(std::vector<float> x, size_t channels) {
  for (size_t e = 0; e < x.size(); ++e)
    x[e] = x[e] * std::ldexp(1.0f, static_cast<int>(e % channels % 9) - 4) + static_cast<float>(e % channels % 3);
  return x;
}

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

// Elements far from 0, tiny, and as large as is allowed.
inline std::vector<std::vector<float>> difficultRanges() {
  return {normal(500, 1, 1, 1e8f),
          normal(500, 1, 1, -1000.0f),
          normal(500, 1, 1e-30f),
          normal(500, 1, 0x1p115f),
          {-0x1.fffffep119f, 0x1.fffffep119f, 0, 1}};
}

// All zeros of either sign: one payload, and +0 comes back.
inline void expectZerosAreZeros(const Codec& c) {
  const std::vector<float> zeros(70, 0.0f), minus(70, -0.0f);
  EXPECT_EQ(encoded(c, zeros), encoded(c, minus)) << c.spec().str();
  for (float v : decoded(c, encoded(c, minus), 70))
    EXPECT_EQ(floatBits(v), 0u) << c.spec().str();
}

}  // namespace lowcomm::test

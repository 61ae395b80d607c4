#include "kernels/philox.h"

#include <gtest/gtest.h>

namespace lowcomm {
namespace {

// Known answers of the authors' Random123 library (kat_vectors: philox4x32 10).
TEST(Philox, KnownAnswers) {
  const PhiloxWords zero = philox(0, {});
  EXPECT_EQ(zero.word[0], 0x6627e8d5u);
  EXPECT_EQ(zero.word[1], 0xe169c58du);
  EXPECT_EQ(zero.word[2], 0xbc57ac4cu);
  EXPECT_EQ(zero.word[3], 0x9b00dbd8u);
  const PhiloxWords ones = philox(~0ull, {~0ull, ~0u, ~0u});
  EXPECT_EQ(ones.word[0], 0x408f276du);
  EXPECT_EQ(ones.word[1], 0x41c83b0eu);
  EXPECT_EQ(ones.word[2], 0xa20bc7c6u);
  EXPECT_EQ(ones.word[3], 0x6d5451fdu);
  const PhiloxWords pi = philox(0x85a308d3243f6a88ull, {0x299f31d0a4093822ull, 0x13198a2eu, 0x03707344u});
  EXPECT_EQ(pi.word[0], 0xd16cfe09u);
  EXPECT_EQ(pi.word[1], 0x94fdcceBu);
  EXPECT_EQ(pi.word[2], 0x5001e420u);
  EXPECT_EQ(pi.word[3], 0x24126ea1u);
}

}  // namespace
}  // namespace lowcomm

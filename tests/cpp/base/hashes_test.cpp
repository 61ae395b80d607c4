#include "base/hashes.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace lowcomm {
namespace {

// RFC 3720, B.4, and the check value every CRC catalogue lists.
TEST(Crc32c, KnownAnswers) {
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(crc32c(nullptr, 0), 0u);
  std::vector<unsigned char> bytes(32, 0);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x8a9136aau);
  bytes.assign(32, 0xff);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x62a8ab43u);
  for (size_t i = 0; i < 32; ++i)
    bytes[i] = static_cast<unsigned char>(i);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x46dd794eu);
}

TEST(Crc32c, FormsAgreeAtEverySizeAndCut) {
  std::mt19937 generator(1);
  std::vector<unsigned char> bytes(50000);
  for (auto& b : bytes)
    b = static_cast<unsigned char>(generator());
  for (size_t size :
       {0, 1, 7, 8, 9, 255, 256, 511, 512, 767, 768, 769, 1000, 12287, 12288, 12289, 13056, 24576, 49999}) {
    const uint32_t whole = crc32cTable(bytes.data() + 1, size, 0);
    if (crc32cHasSse42()) {
      EXPECT_EQ(crc32cSse42(bytes.data() + 1, size, 0), whole) << size;
    }
    if (crc32cHasAvx512()) {
      EXPECT_EQ(crc32cAvx512(bytes.data() + 1, size, 0), whole) << size;
      EXPECT_EQ(crc32cAvx512(bytes.data() + 1, size, 0x12345678u), crc32cTable(bytes.data() + 1, size, 0x12345678u));
    }
    for (size_t cut : {size_t{0}, size / 3, size / 2, size}) {
      EXPECT_EQ(crc32c(bytes.data() + 1 + cut, size - cut, crc32c(bytes.data() + 1, cut)), whole) << size << " " << cut;
      EXPECT_EQ(crc32cTable(bytes.data() + 1 + cut, size - cut, crc32cTable(bytes.data() + 1, cut, 0)), whole);
    }
  }
}

}  // namespace
}  // namespace lowcomm

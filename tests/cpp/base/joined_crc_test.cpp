
#include <gtest/gtest.h>

#include <vector>

#include "base/hashes.h"

namespace lowcomm {
namespace {

TEST(JoinedCrc, IsTheCrcOfBoth) {
  std::vector<unsigned char> bytes(5000);
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<unsigned char>(i * i * 31 + 7 * i);
  for (const size_t size : {0, 1, 2, 7, 255, 256, 4097, 5000}) {
    const uint32_t whole = crc32c(bytes.data(), size);
    for (const size_t cut : {size_t{0}, size / 3, size / 2, size}) {
      const uint32_t first = crc32c(bytes.data(), cut), second = crc32c(bytes.data() + cut, size - cut);
      EXPECT_EQ(joinedCrc32c(first, second, size - cut), whole) << size << " " << cut;
    }
  }
}

TEST(JoinedCrc, ManyZeros) {
  // 2^33 zero bytes behind a text, half of them twice: what no buffer here could hold.
  const uint64_t half = uint64_t{1} << 32;
  const uint32_t text = crc32c("123456789", 9);
  uint32_t zeros = crc32c("\0", 1);  // of one zero byte, then 2, 4, 8, ...
  for (uint64_t bytes = 1; bytes < half; bytes *= 2)
    zeros = joinedCrc32c(zeros, zeros, bytes);
  EXPECT_EQ(joinedCrc32c(joinedCrc32c(text, zeros, half), zeros, half),
            joinedCrc32c(text, joinedCrc32c(zeros, zeros, half), 2 * half));
}

}  // namespace
}  // namespace lowcomm

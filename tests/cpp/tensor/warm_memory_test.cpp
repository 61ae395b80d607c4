#include "tensor/warm_memory.h"

#include <gtest/gtest.h>

#include <vector>

#include "side_by_side.h"

namespace lowcomm {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

TEST(WarmMemory, KeepsABlockForAResultOfAboutItsSize) {
  void* first = nullptr;
  {
    const auto block = warmMemory().allocate(8 * kMiB);
    first = block.get();
  }
  const size_t kept = warmMemory().kept();
  const auto small = warmMemory().allocate(3 * kMiB);  // would hold a block of more than twice its size
  EXPECT_EQ(warmMemory().kept(), kept);
  const auto again = warmMemory().allocate(5 * kMiB);
  EXPECT_EQ(again.get(), first);
  EXPECT_EQ(warmMemory().kept(), kept - 8 * kMiB);
  EXPECT_NE(warmMemory().allocate(8 * kMiB).get(), first);
}

TEST(WarmMemory, IsBounded) {
  std::vector<c10::DataPtr> blocks;
  for (int i = 0; i < 7; ++i)
    blocks.push_back(warmMemory().allocate(WarmMemory::kMost / 4));
  blocks.clear();
  EXPECT_EQ(warmMemory().kept(), WarmMemory::kMost);
  {
    const auto one = warmMemory().allocate(WarmMemory::kLeast - 1),
               other = warmMemory().allocate(WarmMemory::kMost + 1);
  }
  EXPECT_EQ(warmMemory().kept(), WarmMemory::kMost);
}

TEST(WarmMemory, ServesThreads) {
  test::sideBySide(4, [](int t) {
    for (int i = 0; i < 200; ++i) {
      const auto block = warmMemory().allocate((1 + (t + i) % 3) * kMiB);
      auto* bytes = static_cast<unsigned char*>(block.get());
      bytes[0] = bytes[kMiB - 1] = static_cast<unsigned char>(t);
      ASSERT_EQ(bytes[0] + bytes[kMiB - 1], 2 * t);
    }
  });
  EXPECT_LE(warmMemory().kept(), WarmMemory::kMost);
}

}  // namespace
}  // namespace lowcomm

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "collective/context.h"

namespace lowcomm {
namespace {

constexpr size_t kFrame = 1 << 20;

// A message of so many frames; returns where they were.
std::set<const std::byte*> message(BufferPool& pool, size_t frames, size_t frame_bytes = kFrame) {
  std::set<const std::byte*> addresses;
  std::vector<BufferPool::Buffer> taken;
  for (size_t i = 0; i < frames; ++i) {
    taken.push_back(pool.take(frame_bytes));
    addresses.insert(taken.back().get());
  }
  taken.clear();
  pool.trim();
  return addresses;
}

TEST(BufferPool, OneLargeMessageLeavesLittle) {
  BufferPool pool(kFrame);
  message(pool, 64);
  EXPECT_EQ(pool.held(), BufferPool::kKeptBytes);
  for (size_t i = 0; i < 4 * BufferPool::kSeen; ++i) {
    message(pool, 2);
    EXPECT_EQ(pool.held(), BufferPool::kKeptBytes);
  }
}

TEST(BufferPool, MessagesThatComeAgainFindTheirBuffers) {
  BufferPool pool(kFrame);
  for (size_t i = 0; i < 2 * BufferPool::kSeen; ++i)
    message(pool, 64);
  EXPECT_EQ(pool.held(), 64 * kFrame);
  EXPECT_EQ(message(pool, 64), message(pool, 64));
}

TEST(BufferPool, BuffersGoWhenMessagesAreSmallAgain) {
  BufferPool pool(kFrame);
  for (size_t i = 0; i < 4 * BufferPool::kSeen; ++i)
    message(pool, 64);
  for (size_t i = 0; i < 3 * BufferPool::kSeen; ++i)
    message(pool, 2);
  EXPECT_EQ(pool.held(), BufferPool::kKeptBytes);
}

// Of a size that comes no more, so that those that come find theirs, be they smaller or larger.
TEST(BufferPool, BuffersOfAnotherSizeGo) {
  for (const size_t other : {kFrame / 2, 2 * kFrame}) {
    BufferPool pool(kFrame);
    for (size_t i = 0; i < 3 * BufferPool::kSeen; ++i)
      message(pool, 64);
    for (size_t i = 0; i < 3 * BufferPool::kSeen; ++i)
      message(pool, 64 * kFrame / other, other);
    EXPECT_EQ(pool.held(), 64 * kFrame);
    EXPECT_EQ(message(pool, 64 * kFrame / other, other), message(pool, 64 * kFrame / other, other));
  }
}

TEST(BufferPool, ThePoolNeverKeepsMoreThanItMay) {
  BufferPool pool(kFrame);
  for (size_t i = 0; i < 4 * BufferPool::kSeen; ++i)
    message(pool, 2 * BufferPool::kMostKeptBytes / kFrame);
  EXPECT_EQ(pool.held(), BufferPool::kMostKeptBytes);
}

// Buffers of messages that are under way count: a receive that is posted early does not cost the next message its own.
TEST(BufferPool, WhatIsUnderWayCounts) {
  BufferPool pool(kFrame);
  for (size_t i = 0; i < 3 * BufferPool::kSeen; ++i) {
    const BufferPool::Buffer posted = pool.take(32 * kFrame);
    message(pool, 32);
    if (i > 2 * BufferPool::kSeen) EXPECT_EQ(pool.held(), 64 * kFrame);
  }
}

}  // namespace
}  // namespace lowcomm

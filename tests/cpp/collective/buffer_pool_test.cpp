#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "collective/context.h"

// Memory that a pool keeps for the next op or message, and memory that goes.

namespace lowcomm {
namespace {

constexpr size_t kFrame = 1 << 20;

// A message of so many frames; returns the bytes that were made anew for it.
size_t message(BufferPool& pool, size_t frames, size_t frame_bytes = kFrame) {
  const size_t before = pool.held();
  std::vector<BufferPool::Buffer> taken;
  for (size_t i = 0; i < frames; ++i)
    taken.push_back(pool.take(frame_bytes));
  const size_t anew = pool.held() - before;
  taken.clear();
  pool.trim();
  return anew;
}

// Wherever it comes between small ones.
TEST(BufferPool, OneLargeMessageLeavesLittle) {
  for (size_t before = 0; before < 2 * BufferPool::kLately; ++before) {
    BufferPool pool(kFrame);
    for (size_t i = 0; i < before; ++i)
      message(pool, 2);
    message(pool, 64);
    EXPECT_EQ(pool.held(), BufferPool::kKeptBytes);
    for (size_t i = 0; i < 3 * BufferPool::kLately; ++i) {
      message(pool, 2);
      ASSERT_EQ(pool.held(), BufferPool::kKeptBytes);
    }
  }
}

// Several that are under way together are one large one.
TEST(BufferPool, ManyAtOnceLeaveLittle) {
  BufferPool pool(kFrame);
  std::vector<std::vector<BufferPool::Buffer>> messages(2 * BufferPool::kLately);
  for (auto& frames : messages)
    for (size_t i = 0; i < 4; ++i)
      frames.push_back(pool.take());
  for (auto& frames : messages) {
    frames.clear();
    pool.trim();
  }
  EXPECT_EQ(pool.held(), BufferPool::kKeptBytes);
}

// The second one teaches the pool, and the third finds its buffers; small ones may come between.
TEST(BufferPool, MessagesThatComeAgainFindTheirBuffers) {
  for (const size_t between : {size_t{0}, size_t{5}, BufferPool::kLately / 2}) {
    BufferPool pool(kFrame);
    for (size_t i = 0; i < 4 * BufferPool::kLately; ++i) {
      const size_t anew = message(pool, 64);
      if (i == 0) EXPECT_EQ(anew, 64 * kFrame);
      if (i == 1) EXPECT_EQ(anew, 64 * kFrame - BufferPool::kKeptBytes);
      if (i > 1) ASSERT_EQ(anew, 0u) << i;
      for (size_t k = 0; k < between; ++k)
        message(pool, 2);
    }
    EXPECT_EQ(pool.held(), 64 * kFrame);
  }
}

TEST(BufferPool, BuffersGoWhenMessagesAreSmallAgain) {
  BufferPool pool(kFrame);
  for (size_t i = 0; i < 3 * BufferPool::kLately; ++i)
    message(pool, 64);
  for (size_t i = 0; i < 2 * BufferPool::kLately; ++i)
    message(pool, 2);
  EXPECT_EQ(pool.held(), BufferPool::kKeptBytes);
}

// Those of a size that comes no more, so that messages of another one find theirs, be their frames smaller or larger.
TEST(BufferPool, BuffersOfAnotherSizeGo) {
  for (const size_t other : {kFrame / 2, 2 * kFrame}) {
    BufferPool pool(kFrame);
    for (size_t i = 0; i < 10; ++i)
      message(pool, 64);
    for (size_t i = 0; i < 10; ++i) {
      const size_t anew = message(pool, 64 * kFrame / other, other);
      EXPECT_EQ(anew, i == 0 ? 64 * kFrame : 0);
      EXPECT_EQ(pool.held(), 64 * kFrame);
    }
  }
}

// Two sizes in turn both find their buffers.
TEST(BufferPool, BuffersOfTwoSizesStay) {
  BufferPool pool(kFrame);
  for (size_t i = 0; i < 2 * BufferPool::kLately; ++i) {
    const size_t anew = message(pool, 64, i % 2 ? kFrame : kFrame / 2);
    if (i > 4) ASSERT_EQ(anew, 0u) << i;
  }
  EXPECT_EQ(pool.held(), 96 * kFrame);
}

TEST(BufferPool, ThePoolNeverKeepsMoreThanItMay) {
  BufferPool pool(kFrame);
  for (size_t i = 0; i < 20; ++i)
    message(pool, 2 * BufferPool::kMostKeptBytes / kFrame);
  EXPECT_EQ(pool.held(), BufferPool::kMostKeptBytes);
}

// Receives that are posted early, however large, cost the messages that come meanwhile no buffer of theirs.
TEST(BufferPool, WhatIsUnderWayIsNotCounted) {
  BufferPool pool(kFrame);
  const BufferPool::Buffer posted = pool.take(2 * BufferPool::kMostKeptBytes);
  for (const size_t frames : {4, 32}) {
    for (size_t i = 0; i < 2 * BufferPool::kLately; ++i) {
      const size_t anew = message(pool, frames);
      if (i > 1) ASSERT_EQ(anew, 0u) << i;
    }
  }
}

// Somebody may still write there: it is taken again, never freed.
TEST(BufferPool, WhatWentBackByAnExceptionStays) {
  BufferPool pool(kFrame);
  const auto fail = [&] {
    std::vector<BufferPool::Buffer> taken;
    for (size_t i = 0; i < 16; ++i)
      taken.push_back(pool.take());
    throw std::runtime_error("the op failed");
  };
  EXPECT_THROW(fail(), std::runtime_error);
  for (size_t i = 0; i < 3 * BufferPool::kLately; ++i) {
    EXPECT_EQ(message(pool, 16), 0u);
    ASSERT_EQ(pool.held(), 16 * kFrame);
  }
}

}  // namespace
}  // namespace lowcomm

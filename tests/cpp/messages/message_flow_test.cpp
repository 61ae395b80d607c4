// Numbers of messages: which tags are counted by themselves, what comes twice, and that no tag is remembered for ever.
#include "messages/announcement.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <random>

#include "p2p_cases.h"

namespace lowcomm {
namespace {

using namespace test;

TEST(MessageNumbers, TheFirstTagsAreCountedByThemselves) {
  SenderNumbers sent;
  const struct {
    SenderNumbers& sent;
    uint32_t next(uint32_t tag) const { return sent.next({MessageFlow::Kind::tag, tag}); }
  } numbers{sent};
  for (uint32_t turn = 1; turn <= 3; ++turn) {
    for (uint32_t tag = 0; tag < kCountedTags; ++tag)
      ASSERT_EQ(numbers.next(7 * tag), turn);
  }
  EXPECT_EQ(numbers.next(1), kSharedNumber + 1);
  EXPECT_EQ(numbers.next(2), kSharedNumber + 2);
  EXPECT_EQ(numbers.next(1), kSharedNumber + 3);
  EXPECT_EQ(numbers.next(0), 4u);
}

TEST(MessageNumbers, EachChannelIsCountedByItself) {
  SenderNumbers numbers;
  for (uint32_t turn = 1; turn <= 2; ++turn) {
    for (uint32_t channel = 0; channel < 2 * kCountedTags; ++channel)
      ASSERT_EQ(numbers.next({MessageFlow::Kind::channel, channel}), turn);
  }
  EXPECT_EQ(numbers.next({MessageFlow::Kind::tag, 0}), 1u) << "channels take no place of tags";
}

TEST(MessageNumbers, ComeAround) {
  EXPECT_EQ(numberAfter(kSharedNumber - 1), 0u);
  EXPECT_EQ(numberAfter(UINT32_MAX), kSharedNumber);
}

TEST(MessageNumbers, ASharedOneIsTakenOnce) {
  std::vector<uint32_t> order;
  for (uint32_t i = 1; i <= 2000; ++i)
    order.push_back(kSharedNumber + i);
  std::shuffle(order.begin(), order.end(), std::mt19937(3));
  ReceiverNumbers numbers;
  for (size_t i = 0; i < order.size(); ++i) {
    ASSERT_TRUE(numbers.take(order[i])) << order[i];
    ASSERT_FALSE(numbers.take(order[i / 2])) << order[i / 2];
  }
}

// Growth of the heap over sixty thousand tags, with a message each: a fifth of a byte a tag of slack.
TEST(MessageNumbers, ATagLeavesNothingBehind) {
  constexpr uint32_t kFirst = 2 * kCountedTags, kTags = 60'000;
  Ranks ranks(2);
  const Tensor sent = Tensor::random(64, 1, "sym4:bucket=64");
  Tensor got = sent.empty();
  const auto message = [&](uint32_t tag) {
    const auto receive = receiving(ranks.engine(1), got, 0, tag);
    expectFinish(ranks.engine(0), sending(ranks.engine(0), sent, 1, tag));
    expectFinish(ranks.engine(1), receive);
  };
  for (uint32_t tag = 0; tag < kFirst; ++tag)
    message(tag);
  const size_t before = mallinfo2().uordblks;
  for (uint32_t tag = kFirst; tag < kFirst + kTags; ++tag)
    message(tag);
  // Two bytes a tag, for what threads of the last messages hold; a pointer a tag would be 480 kB.
  EXPECT_LT(mallinfo2().uordblks, before + 2 * kTags) << before;
  EXPECT_TRUE(got.data == sent.received());
  message(0);
  message(kFirst);
}

}  // namespace
}  // namespace lowcomm

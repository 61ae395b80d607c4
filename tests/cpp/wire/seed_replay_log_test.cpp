#include "wire/seed_replay_log.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/error.h"

namespace lowcomm {
namespace {

std::vector<std::byte> bytes(std::initializer_list<int> values) {
  std::vector<std::byte> out;
  for (const int value : values)
    out.push_back(static_cast<std::byte>(value));
  return out;
}

std::vector<std::byte> record(uint64_t iteration) {
  static const auto a = bytes({1, 2, 3}), b = bytes({});
  return writeReplayRecord({iteration, 0.5f, 0.25f, {{7, 3, a}, {uint64_t{1} << 63, 0, b}}});
}

// FORMAT.md, "Seed replay", by hand; the checksum is that of hashes_test.cpp's function.
TEST(SeedReplayLog, MessageIsAsTheFormatSays) {
  const auto payload = bytes({0xaa, 0xbb});
  const auto message = writeReplayMessage({0x0102, 3, 2, payload});
  const auto head = bytes({2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0xaa, 0xbb});
  ASSERT_EQ(message.size(), kReplayMessageBytes + 2);
  EXPECT_TRUE(std::equal(head.begin(), head.end(), message.begin()));
  const ReplayMessage read = readReplayMessage(message);
  EXPECT_EQ(read.machine, 0x0102u);
  EXPECT_EQ(read.iteration, 3u);
  EXPECT_EQ(read.count, 2u);
  EXPECT_TRUE(std::equal(payload.begin(), payload.end(), read.payload.begin(), read.payload.end()));
}

TEST(SeedReplayLog, RecordsComeBack) {
  auto log = record(41);
  const auto next = record(42);
  log.insert(log.end(), next.begin(), next.end());
  const auto records = ReplayRecords(log).read();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[1].iteration, 42u);
  EXPECT_EQ(records[1].lr, 0.5f);
  EXPECT_EQ(records[1].weight_decay, 0.25f);
  ASSERT_EQ(records[1].entries.size(), 2u);
  EXPECT_EQ(records[1].entries[0].payload.size(), 3u);
  EXPECT_EQ(records[1].entries[1].machine, uint64_t{1} << 63);
  EXPECT_TRUE(ReplayRecords({}).read().empty());
}

TEST(SeedReplayLog, AnyBitFlippedIsRefused) {
  const auto whole = record(5);
  const auto message = writeReplayMessage({1, 5, 3, bytes({1, 2, 3})});
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    auto spoilt = whole;
    spoilt[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_THROW(ReplayRecords(spoilt).read(), WireError) << bit;
  }
  for (size_t bit = 0; bit < message.size() * 8; ++bit) {
    auto spoilt = message;
    spoilt[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_THROW(readReplayMessage(spoilt), WireError) << bit;
  }
}

TEST(SeedReplayLog, AnyCutIsRefused) {
  const auto whole = record(5);
  const auto message = writeReplayMessage({1, 5, 3, bytes({1, 2, 3})});
  for (size_t size = 1; size < whole.size(); ++size)
    EXPECT_THROW(ReplayRecords(std::span(whole).first(size)).read(), WireError) << size;
  for (size_t size = 0; size < message.size(); ++size)
    EXPECT_THROW(readReplayMessage(std::span(message).first(size)), WireError) << size;
}

TEST(SeedReplayLog, OrderIsChecked) {
  auto gap = record(5);
  const auto later = record(7);
  gap.insert(gap.end(), later.begin(), later.end());
  EXPECT_THROW(ReplayRecords(gap).read(), WireError);
  EXPECT_THROW(ReplayRecords(writeReplayRecord({5, 1, 0, {{2, 0, {}}, {1, 0, {}}}})).read(), WireError);
  EXPECT_THROW(ReplayRecords(writeReplayRecord({5, 1, 0, {{2, 0, {}}, {2, 0, {}}}})).read(), WireError);
}

std::vector<std::byte> logOf(uint64_t first, int count) {
  std::vector<std::byte> log;
  for (int i = 0; i < count; ++i) {
    const auto one = record(first + i);
    log.insert(log.end(), one.begin(), one.end());
  }
  return log;
}

TEST(SeedReplayLog, SkipsAndFindsRecordsByTheirHeaders) {
  const auto log = logOf(41, 3);
  const size_t one = log.size() / 3;
  const ReplayRecords records(log);
  EXPECT_EQ(records.firstIteration(), 41u);
  for (size_t count = 0; count <= 3; ++count) {
    EXPECT_EQ(records.skip(count).data(), log.data() + count * one);
    EXPECT_EQ(records.skip(count).size(), log.size() - count * one);
    EXPECT_EQ(records.from(41 + count).size(), log.size() - count * one);
  }
  EXPECT_EQ(records.from(0).size(), log.size());
  EXPECT_TRUE(records.from(99).empty());
  EXPECT_THROW(records.skip(4), WireError);
  EXPECT_THROW(ReplayRecords({}).firstIteration(), WireError);
  EXPECT_TRUE(ReplayRecords({}).skip(0).empty());
  for (size_t size = 1; size < one; ++size) {
    EXPECT_THROW(ReplayRecords(std::span(log).first(size)).firstIteration(), WireError) << size;
    EXPECT_THROW(ReplayRecords(std::span(log).first(size)).skip(1), WireError) << size;
  }
}

TEST(SeedReplayLog, WholePrefixEndsBeforeACutOrSpoiltRecord) {
  const auto log = logOf(5, 3);
  const size_t one = log.size() / 3;
  for (size_t size = 0; size <= log.size(); ++size)
    EXPECT_EQ(ReplayRecords(std::span(log).first(size)).wholePrefix().size(), size / one * one) << size;
  for (size_t at = one; at < 2 * one; ++at) {
    auto spoilt = log;
    spoilt[at] ^= std::byte{1};
    EXPECT_EQ(ReplayRecords(spoilt).wholePrefix().size(), one) << at;
  }
  EXPECT_EQ(ReplayRecords(std::vector<std::byte>(64)).wholePrefix().size(), 0u);
}

}  // namespace
}  // namespace lowcomm

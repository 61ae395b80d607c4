// Messages of channels: segments with codecs of their own, keys of samples, flows that do not wait for each other.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/op_queue.h"
#include "p2p_cases.h"

namespace lowcomm {
namespace {

using namespace test;

constexpr uint64_t kRow = 70'000;  // elements of a sample

// Sample 0 exact, sample 1 in 8 bits, sample 2 in 2.
Layout threeSamples() {
  return Layout({{0, kRow, CodecSpec::parse("none")},
                 {kRow, kRow, CodecSpec::parse("minmax8:bucket=128")},
                 {2 * kRow, kRow, CodecSpec::parse("gauss2")}});
}

MessageKey channel(uint32_t number, std::vector<SampleKey> samples) {
  return {{MessageFlow::Kind::channel, number}, std::move(samples)};
}

std::shared_ptr<P2pSend> send(EngineQueue& queue, const MessageKey& key, const Bytes& data, const Draws& draws) {
  GroupContext& group = queue.group();
  const auto message =
      std::make_shared<P2pSend>(group, 1, key, planP2p(threeSamples(), DType::float32, group.chunk_bytes));
  queue.send(message, makeSource(message->op, nullptr, {message->plan, data.data(), draws}));
  return message;
}

std::shared_ptr<P2pRecv> recv(EngineQueue& queue, const MessageKey& key, Bytes& data) {
  GroupContext& group = queue.group();
  const auto message =
      std::make_shared<P2pRecv>(group, 0, key, planP2p(threeSamples(), DType::float32, group.chunk_bytes));
  queue.recv(message, makeSink(message->op, nullptr, {message->plan, data.data()}));
  return message;
}

// The text of what finishing the message throws.
std::string ended(EngineQueue& queue, P2pMessage& message) {
  return thrownBy([&] { queue.finish(message); });
}

TEST(Channel, SegmentsHaveTheirCodecs) {
  Ranks ranks(2, [](int, GroupConfig& config) { config.connections = 3; });
  const Bytes sent = randomTensor(DType::float32, 3 * kRow, 1);
  const Draws draws{7, streamOf(0, 0), 3};
  const MessageKey key = channel(4, {{11, 0}, {12, 0}, {13, 5}});
  Bytes got(sent.size());
  together(ranks, [&](int rank, Engine& engine) {
    EngineQueue queue(engine);
    std::shared_ptr<P2pMessage> message;
    if (rank == 0) message = send(queue, key, sent, draws);
    if (rank == 1) message = recv(queue, key, got);
    EXPECT_EQ(ended(queue, *message), kNothing);
  });
  EXPECT_TRUE(got == asDecoded(threeSamples(), DType::float32, sent, draws));
  EXPECT_TRUE(std::equal(got.begin(), got.begin() + kRow * 4, sent.begin())) << "the exact sample";
}

// Both sides get the samples with their versions, a long list's by its hash, and both go on.
TEST(Channel, SamplesAndVersionsThatDifferAreNamedOnBothSides) {
  Ranks ranks(2);
  const Bytes sent = randomTensor(DType::float32, 3 * kRow, 1);
  // The text of what rank 0's and rank 1's side of a message throw.
  const auto said = [&](const MessageKey& mine, const MessageKey& theirs, Bytes& got) {
    std::vector<std::string> texts(2);
    together(ranks, [&](int rank, Engine& engine) {
      EngineQueue queue(engine);
      std::shared_ptr<P2pMessage> message;
      if (rank == 0) message = send(queue, mine, sent, {});
      if (rank == 1) message = recv(queue, theirs, got);
      texts[rank] = ended(queue, *message);
    });
    return texts;
  };
  std::vector<SampleKey> many(1000), others(1000);
  others.back().version = 1;
  const std::vector<SampleKey> few = {{11, 0}, {12, 0}, {13, 5}};
  struct Case {
    std::vector<SampleKey> mine, theirs;
    std::vector<std::string> parts;
  };
  for (const Case& c : {Case{few, {{11, 0}, {12, 0}, {13, 6}}, {"rank 0 has '11@0,12@0,13@5'", "'11@0,12@0,13@6'"}},
                        Case{few, {{11, 0}, {14, 0}, {13, 5}}, {"rank 0 has '11@0,12@0,13@5'", "'11@0,14@0,13@5'"}},
                        Case{many, others, {"... hash "}}}) {
    Bytes got(sent.size(), std::byte{0x55});
    for (const std::string& text : said(channel(4, c.mine), channel(4, c.theirs), got)) {
      EXPECT_TRUE(holds(text, {"of channel 4", "samples differs"}));
      EXPECT_TRUE(holds(text, c.parts));
    }
    EXPECT_TRUE(got == Bytes(sent.size(), std::byte{0x55}));
  }
  Bytes got(sent.size());
  EXPECT_EQ(said(channel(4, few), channel(4, few), got), std::vector<std::string>(2, kNothing));
}

// Channels, a tag of the same number among them, are received in another order than they are sent in.
TEST(Channel, FlowsDoNotWaitForEachOther) {
  Ranks ranks(2);
  std::vector<Bytes> sent, got;
  for (uint32_t number : {0u, 1u, 2u}) {
    sent.push_back(randomTensor(DType::float32, 3 * kRow, number));
    got.emplace_back(sent.back().size());
  }
  const Tensor tagged = Tensor::random(5000, 9);
  Tensor taken = tagged.empty();
  together(ranks, [&](int rank, Engine& engine) {
    EngineQueue queue(engine);
    std::vector<std::shared_ptr<P2pMessage>> messages;
    if (rank == 0) {
      for (uint32_t number : {0u, 1u, 2u})
        messages.push_back(send(queue, channel(number, {{number, 0}}), sent[number], {}));
      messages.push_back(sending(engine, tagged, 1, 1));
    } else {
      messages.push_back(receiving(engine, taken, 0, 1));
      for (uint32_t number : {2u, 1u, 0u})
        messages.push_back(recv(queue, channel(number, {{number, 0}}), got[number]));
    }
    for (const auto& message : messages)
      EXPECT_EQ(ended(queue, *message), kNothing);
  });
  EXPECT_TRUE(taken.data == tagged.received());
  for (uint32_t number : {0u, 1u, 2u})
    EXPECT_TRUE(got[number] == asDecoded(threeSamples(), DType::float32, sent[number], {}));
}

TEST(Channel, FramesTakeTheConnectionsInTurn) {
  MessageTags messages(1, 0);
  std::set<uint32_t> seen;
  for (int message = 0; message < 2; ++message) {
    const uint32_t first = messages.next();
    EXPECT_TRUE(MessageTags::belongs(first, 1, 0));
    EXPECT_FALSE(MessageTags::belongs(first, 0, 1)) << "a tag of the messages the other way";
    EXPECT_FALSE(MessageTags::belongs(first + 1, 1, 0));
    for (size_t k = 0; k < 6; ++k) {
      const uint32_t tag = MessageTags::ofFrame(k, 3, first);
      EXPECT_EQ(tag, MessageTags::ofFrame(k + 3, 3, first));
      EXPECT_GE(tag, kFirstMessageTag);
      EXPECT_LT(tag, kEndOfMessageTags);
      seen.insert(tag);
    }
  }
  EXPECT_EQ(seen.size(), 6u);
}

}  // namespace
}  // namespace lowcomm

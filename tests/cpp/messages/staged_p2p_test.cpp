// Messages between two ranks, whose elements may be on a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "host_device_codec.h"
#include "p2p_cases.h"

namespace lowcomm {
namespace {

using namespace test;

// The errors of the two ranks about one message from rank 0 to rank 1; bit r of `staging`: whether rank r stages.
std::vector<std::string> told(Ranks& ranks, unsigned staging, const Tensor& sent, Tensor& got,
                              std::vector<uint64_t>* crossed = nullptr) {
  std::vector<std::string> texts(2);
  together(ranks, [&](int rank, Engine& engine) {
    const auto device_codec = staging >> rank & 1 ? lateDeviceCodec(engine.group().chunk_bytes) : nullptr;
    const PostedReceive posted =
        rank == 0 ? postSend(engine, sent, 1, 0, device_codec.get()) : postRecv(engine, got, 0, 0, device_codec.get());
    EXPECT_TRUE(posted.outcome.ok());
    texts[rank] = finish(engine, posted.message).story();
    if (crossed && device_codec) crossed->push_back(device_codec->hostBytes() + device_codec->deviceBytes());
  });
  return texts;
}

// Those of the definition, on ranks that stage and on ranks that do not.
TEST(StagedP2p, ValuesAreTheDecodedOnes) {
  Ranks ranks(2);
  for (const std::string& codec : kCodecs) {
    for (DType dtype : kFloats) {
      for (uint64_t n : {0u, 1u, 511u, 1025u, 16384u, 200'003u}) {
        const Tensor sent = Tensor::random(wholeRows(n, codec), 5, codec, dtype);
        for (unsigned staging : {0u, 1u, 2u, 3u}) {
          Tensor got = sent.empty();
          const auto texts = told(ranks, staging, sent, got);
          EXPECT_EQ(texts, std::vector<std::string>(2, "no error"));
          ASSERT_TRUE(got.data == sent.received()) << codec << " " << dtypeName(dtype) << " " << n << ": " << staging;
        }
      }
    }
  }
}

TEST(StagedP2p, OnlyCodesCross) {
  Ranks ranks(2);
  const Tensor sent = Tensor::random(300'000, 5);
  Tensor got = sent.empty();
  uint64_t codes = 0;
  for (const Frame& chunk : sent.plan(ranks.engine(0)).frames)
    codes += chunk.payload_bytes;
  for (unsigned staging : {1u, 2u}) {
    std::vector<uint64_t> crossed;
    told(ranks, staging, sent, got, &crossed);
    EXPECT_EQ(crossed, std::vector<uint64_t>{codes});
  }
}

TEST(StagedP2p, WhatCannotBeSentIsToldAsTheHostTellsIt) {
  for (uint64_t at : {0u, 299'999u}) {
    Tensor sent = Tensor::random(300'000, 5), got = sent.empty();
    fromFloat(sent.dtype, sent.data.data() + 4 * at, NAN);
    std::vector<std::vector<std::string>> texts;
    for (unsigned staging : {0u, 1u, 2u, 3u}) {
      Ranks ranks(2);
      texts.push_back(told(ranks, staging, sent, got));
      EXPECT_EQ(texts.back(), texts.front()) << staging;
      const Tensor fine = Tensor::random(5000, 6);
      Tensor taken = fine.empty();
      EXPECT_EQ(told(ranks, staging, fine, taken), std::vector<std::string>(2, "no error"));
      EXPECT_TRUE(taken.data == fine.received());
    }
    EXPECT_TRUE(holds(texts[0][0], {"nan at element " + std::to_string(at)})) << texts[0][0];
    EXPECT_TRUE(holds(texts[0][1], {"nan at element " + std::to_string(at)})) << texts[0][1];
  }
}

}  // namespace
}  // namespace lowcomm

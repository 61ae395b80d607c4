// Collectives whose elements are on a device: what they are refused for is told as it is of host memory.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <list>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collective/collectives.h"
#include "collective_cases.h"
#include "staged_cases.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using namespace test;

// Elements that stay until the ranks have gone: a device may still be at them when an op has thrown.
class Memory {
 public:
  std::vector<float>& of(uint64_t n, float value = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    return all_.emplace_back(n, value);
  }

 private:
  std::mutex mutex_;
  std::list<std::vector<float>> all_;
} memory;

// Of x's parts, each as long as y.
ScatterMessage scatterOf(const std::vector<float>& x, std::vector<float>& y, const CodecSpec& codec, int rank) {
  ScatterMessage message{{Layout::single(y.size(), codec)}, DType::float32};
  for (const float* part = x.data(); part < x.data() + x.size(); part += y.size())
    message.inputs.push_back(part);
  message.output = y.data();
  message.draws = drawsOf(rank);
  return message;
}

// The error of one op on every rank, in a separate group.
std::vector<std::string> told(int size, const std::string& name, Staging staging, const Op& op) {
  Ranks ranks(size);
  std::vector<std::string> texts;
  for (const auto& outcome : ranks.run(name, on(staging, op)))
    texts.push_back(outcome.story());
  // The group goes on.
  ranks.expectRun("all_reduce", on(staging, [&](int rank, OpContext& context, DeviceCodec* device_codec) {
                    auto& fine = memory.of(1000, 1);
                    allReduce(context, {{1000, CodecSpec::parse("sym4"), DType::float32, fine.data(), drawsOf(rank)}},
                              kSum, device_codec);
                  }));
  return texts;
}

TEST(Staged, WhatCannotBeSentIsToldAsTheHostTellsIt) {
  const uint64_t n = 6 * 57344 + 13;
  const int size = 3;
  for (const char* codec : {"qsgd8:bucket=64", "bf16", "topk", "gauss4"}) {
    const CodecSpec spec = CodecSpec::parse(codec);
    // In a slice for another, in the own one, and in the last block of all.
    for (uint64_t at : {uint64_t{3}, n / 2 + 1, n - 1}) {
      std::vector<std::vector<std::string>> texts;
      for (Staging staging : {kNobody, kAll, kEven, ~kEven}) {
        texts.push_back(told(size, "all_reduce", staging, [&](int rank, OpContext& op, DeviceCodec* device_codec) {
          auto& x = memory.of(n, 1);
          if (rank == 1) x[at] = NAN;
          allReduce(op, {{n, spec, DType::float32, x.data(), drawsOf(rank)}}, kSum, device_codec);
        }));
        texts.push_back(told(size, "all_gather", staging, [&](int rank, OpContext& op, DeviceCodec* device_codec) {
          auto &x = memory.of(n, 1), &y = memory.of(n * size);
          if (rank == 1) x[at] = NAN;
          GatherMessage message = test::gatherOf(x, y, spec, device_codec);
          message.draws = drawsOf(rank);
          allGather(op, {message});
        }));
        texts.push_back(told(size, "reduce_scatter", staging, [&](int rank, OpContext& op, DeviceCodec* device_codec) {
          auto &x = memory.of(n * size, 1), &y = memory.of(n);
          if (rank == 1) x[(at < n / 2 ? 0 : at < n - 1 ? 1 : 2) * n + at] = NAN;
          reduceScatter(op, {scatterOf(x, y, spec, rank)}, kSum, device_codec);
        }));
      }
      for (size_t i = 3; i < texts.size(); ++i)
        EXPECT_EQ(texts[i], texts[i % 3]) << codec << " at " << at << ", way " << i / 3;
      EXPECT_TRUE(test::holds(texts[0][1], {"nan"})) << texts[0][1];
    }
  }
}

TEST(Staged, SumsThatCannotBeSentAreToldAsTheHostTellsThem) {
  const uint64_t n = 6 * 57344 + 13;
  for (const auto& [codec, value] : {std::pair("bf16", 2.5e38f), std::pair("qsgd8:bucket=64", 8e37f)}) {
    for (uint64_t at : {uint64_t{5}, n - 1}) {
      std::vector<std::vector<std::string>> texts;
      for (Staging staging : {kNobody, kAll, kEven}) {
        texts.push_back(told(2, "all_reduce", staging, [&](int rank, OpContext& op, DeviceCodec* device_codec) {
          auto& x = memory.of(n, 1);
          x[at] = value;
          allReduce(op, {{n, CodecSpec::parse(codec), DType::float32, x.data(), drawsOf(rank)}}, kSum, device_codec);
        }));
      }
      EXPECT_TRUE(test::holds(texts[0][0], {"of the sum"})) << texts[0][0];
      EXPECT_EQ(texts[1], texts[0]) << codec;
      EXPECT_EQ(texts[2], texts[0]) << codec;
    }
  }
}

// A frame whose checksum is right and whose payload is none: rank 1 sends it to rank 0 as number `frame`.
std::string attributed(Staging staging, int frame, const std::string& name, const Op& op) {
  Ranks ranks(2);
  std::atomic<int> seen{0};
  ranks.hub().tamper([&](int from, int to, Lane lane, std::span<std::byte> bytes) {
    if (lane != Lane::bulk || from != 1 || to != 0 || seen++ != frame) return;
    const FrameHeader header = openFrame(bytes);
    const auto whole = bytes.first(kFrameHeaderBytes + header.payload_bytes);
    std::memset(whole.data() + kFrameHeaderBytes, 0xff, 8);  // a base and a step that are NaN
    sealFrame(whole, header);
  });
  const auto outcomes = ranks.run(name, on(staging, op));
  EXPECT_TRUE(outcomes[0].is<PeerError>()) << outcomes[0].what();
  return outcomes[0].story();
}

TEST(Staged, SpoiltPayloadsAreBlamedOnTheirSender) {
  const uint64_t n = 6 * 57344 + 13;
  const CodecSpec codec = CodecSpec::parse("minmax8:bucket=64");
  const Op all_reduce = [&](int rank, OpContext& op, DeviceCodec* device_codec) {
    auto& x = memory.of(n, 1);
    allReduce(op, {{n, codec, DType::float32, x.data(), drawsOf(rank)}}, kSum, device_codec);
  };
  const Op all_gather = [&](int rank, OpContext& op, DeviceCodec* device_codec) {
    auto &x = memory.of(n, 1), &y = memory.of(2 * n);
    GatherMessage message = test::gatherOf(x, y, codec, device_codec);
    message.draws = drawsOf(rank);
    allGather(op, {message});
  };
  const Op reduce_scatter = [&](int rank, OpContext& op, DeviceCodec* device_codec) {
    auto &x = memory.of(2 * n, 1), &y = memory.of(n);
    reduceScatter(op, {scatterOf(x, y, codec, rank)}, kSum, device_codec);
  };
  for (int frame : {1, 3, 5}) {
    for (const auto& [name, op] :
         {std::pair("all_reduce", all_reduce), {"all_gather", all_gather}, {"reduce_scatter", reduce_scatter}}) {
      const std::string expected = attributed(kNobody, frame, name, op);
      EXPECT_TRUE(test::holds(expected, {"rank 1"})) << expected;
      for (Staging staging : {kAll, kEven})
        EXPECT_EQ(attributed(staging, frame, name, op), expected) << name << ", frame " << frame;
    }
  }
}

}  // namespace
}  // namespace lowcomm

#include "collective/collectives.h"

#include <gtest/gtest.h>

#include "collective/message_summary.h"
#include "collective_cases.h"
#include "ranks_on_threads.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::edgeTensors;
using test::Ranks;
using test::single;
using Tensor = test::TensorKind;

// One op of several messages: what each rank puts in, what it gets, and the definition of what it must get.
class Gather {
 public:
  Gather(int size, std::vector<Tensor> tensors, bool in_place, uint32_t step = 3)
      : size_(size), tensors_(std::move(tensors)), in_place_(in_place), step_(step) {
    outputs_.resize(size);
    inputs_.resize(size);
    for (int rank = 0; rank < size; ++rank) {
      for (size_t m = 0; m < tensors_.size(); ++m) {
        inputs_[rank].push_back(test::randomTensor(tensors_[m].dtype, tensors_[m].layout.elements(), seedOf(rank, m)));
        // Everything a rank must write is wrong before it does.
        outputs_[rank].push_back(std::vector<Bytes>(size, Bytes(inputs_[rank][m].size(), std::byte{0xdd})));
        if (in_place) outputs_[rank][m][rank] = inputs_[rank][m];
      }
    }
  }

  void operator()(int rank, OpContext& op) {
    std::vector<GatherMessage> messages;
    for (size_t m = 0; m < tensors_.size(); ++m) {
      GatherMessage message{{tensors_[m].layout}, tensors_[m].dtype};
      message.input = in_place_ ? outputs_[rank][m][rank].data() : inputs_[rank][m].data();
      for (Bytes& output : outputs_[rank][m])
        message.outputs.push_back(output.data());
      message.draws = draws(rank, m);
      messages.push_back(std::move(message));
    }
    allGather(op, messages);
  }

  void expectDefinition() const {
    for (size_t m = 0; m < tensors_.size(); ++m) {
      for (int owner = 0; owner < size_; ++owner) {
        const auto& [layout, dtype] = tensors_[m];
        const Bytes expected = test::asDecoded(layout, dtype, inputs_[owner][m], draws(owner, m));
        for (int rank = 0; rank < size_; ++rank) {
          // Compared as bytes: all ranks are then bit-equal too.
          EXPECT_TRUE(outputs_[rank][m][owner] == expected)
              << "rank " << rank << " of " << size_ << ", message " << m << " of rank " << owner << ": "
              << dtypeName(dtype) << " " << layout.text().substr(0, 200);
        }
      }
    }
  }

  const Bytes& output(int rank, size_t m, int owner) const { return outputs_[rank][m][owner]; }

 private:
  static uint32_t seedOf(int rank, size_t m) { return static_cast<uint32_t>(1000 * rank + m); }
  Draws draws(int rank, size_t m) const {
    return {5, static_cast<uint32_t>(rank << 16) + static_cast<uint32_t>(m * 300), step_};
  }

  const int size_;
  const std::vector<Tensor> tensors_;
  const bool in_place_;
  const uint32_t step_;
  std::vector<std::vector<Bytes>> inputs_;                // [rank][message]
  std::vector<std::vector<std::vector<Bytes>>> outputs_;  // [rank][message][owner]
};

std::vector<OpCounters> expectGathers(int size, std::vector<Tensor> tensors, bool in_place) {
  Gather gather(size, std::move(tensors), in_place);
  Ranks ranks(size);
  auto counters = ranks.expectRun("all_gather", std::ref(gather));
  gather.expectDefinition();
  return counters;
}

TEST(AllGather, EveryRankEndsWithTheOwnersDecodedBits) {
  for (int size = 1; size <= 12; ++size) {
    for (DType dtype : test::kFloats) {
      if (size > 5 && dtype != test::kFloats[size % 3]) continue;  // time: all of them up to 5 ranks, then in turn
      expectGathers(size, edgeTensors(dtype), size % 2);
    }
  }
}

TEST(AllGather, OneMessageAnOp) {
  for (const Tensor& tensor : edgeTensors(DType::float32)) {
    for (int size : {2, 3})
      expectGathers(size, {tensor}, false);
  }
}

TEST(AllGather, NoneCarriesEveryType) {
  std::vector<Tensor> tensors;
  for (DType dtype : test::kAllTypes) {
    for (uint64_t n : {0, 1, 511, 512, 513, 70000})
      tensors.push_back({single(n, "none"), dtype});
  }
  for (bool in_place : {false, true})
    expectGathers(3, tensors, in_place);
}

// More frames than the window has rounds, the last one short.
TEST(AllGather, ManyChunks) {
  for (int size : {2, 3}) {
    for (bool in_place : {false, true}) {
      expectGathers(size, {{single(7 * 16384 + 13, "none"), DType::float32}}, in_place);
      expectGathers(size, {{single(6 * 131072 + 13, "minmax4"), DType::bfloat16}}, in_place);
      expectGathers(size, {{single(6 * 65536 + 513, "qsgd8:bucket=65536"), DType::float32}}, in_place);
    }
  }
}

TEST(AllGather, LayoutsOfManySegments) {
  for (int size : {2, 3, 7}) {
    for (uint32_t seed = 0; seed < 2; ++seed) {
      expectGathers(size,
                    {{test::mixedLayout(100, seed), DType::float32},
                     {test::mixedLayout(5, seed + 50, 50000), DType::float16},
                     {single(700, "none"), DType::int64}},
                    seed % 2);
    }
  }
}

TEST(AllGather, SameBitsEveryTimeOtherDrawsOtherBits) {
  const std::vector<Tensor> tensors = {{single(100000, "qsgd4"), DType::float32}};
  Gather first(3, tensors, false), second(3, tensors, false), later(3, tensors, false, 4);
  Ranks ranks(3), others(3);
  ranks.expectRun("all_gather", std::ref(first));
  ranks.expectRun("all_gather", std::ref(later));  // in between: what an op leaves behind must not show
  others.expectRun("all_gather", std::ref(later));
  ranks.expectRun("all_gather", std::ref(second));
  for (int rank = 0; rank < 3; ++rank) {
    for (int owner = 0; owner < 3; ++owner)
      EXPECT_TRUE(first.output(rank, 0, owner) == second.output(rank, 0, owner));
  }
  EXPECT_FALSE(first.output(0, 0, 0) == later.output(0, 0, 0));
}

// (W−1)·n elements out and in, a header a frame, and one description a peer.
TEST(AllGather, CountsItsBytes) {
  for (int size : {1, 2, 4}) {
    for (uint64_t n : {0, 1000, 200000}) {
      for (const char* codec : {"none", "minmax8"}) {
        const MessagePlan plan = planMessage(single(n, codec), DType::float32, kMinChunkBytes);
        uint64_t frames = kFrameHeaderBytes + describe("all_gather", {plan}).text().size();
        for (const Frame& chunk : plan.frames)
          frames += kFrameHeaderBytes + chunk.payload_bytes;
        for (const OpCounters& counters : expectGathers(size, {{plan.layout, plan.dtype}}, false)) {
          EXPECT_EQ(counters.raw_bytes, n * 4 * (size - 1));
          EXPECT_EQ(counters.wire_bytes, frames * (size - 1));
          EXPECT_EQ(counters.received_bytes, frames * (size - 1));
        }
      }
    }
  }
}

TEST(AllGather, RefusesATypeItsCodecDoesNotTake) {
  Ranks ranks(2);
  Gather wrong(2, {{single(10, "minmax8"), DType::int32}}, false);
  for (const auto& outcome : ranks.run("all_gather", [&](int rank, OpContext& op) { wrong(rank, op); })) {
    EXPECT_TRUE(outcome.is<TypeError>()) << outcome.what();
    EXPECT_EQ(outcome.counters.wire_bytes, 0u);
  }
  Gather right(2, {{single(10, "minmax8"), DType::float32}}, false);
  ranks.expectRun("all_gather", std::ref(right));
  right.expectDefinition();
}

}  // namespace
}  // namespace lowcomm

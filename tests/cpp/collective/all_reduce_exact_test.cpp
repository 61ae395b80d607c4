// all_reduce without a codec: every type and kind of reduction, summed in rank order.
#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"
#include "collective/all_reduce.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "kernels/reduce.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::Outcome;
using test::Ranks;

const std::vector<uint64_t> kSizes = {0, 1, 2, 511, 512, 513, 40000};

Bytes contribution(DType dtype, uint64_t elements, int rank) {
  return test::randomTensor(dtype, elements, static_cast<uint32_t>(elements) * 8 + static_cast<uint32_t>(rank));
}

Bytes expected(DType dtype, uint64_t elements, int size, const Reduction& reduction) {
  Bytes sum(elements * itemBytes(accumulatorType(dtype))), out(elements * itemBytes(dtype));
  for (int rank = 0; rank < size; ++rank) {
    const Bytes x = contribution(dtype, elements, rank);
    if (rank == 0) {
      reduceAssign(sum.data(), x.data(), dtype, elements);
    } else {
      reduceInto(sum.data(), x.data(), dtype, reduction.kind, elements);
    }
  }
  reduceFinish(out.data(), sum.data(), dtype, elements, reduction.average ? size : 0);
  return out;
}

// To the bit, whatever the sizes: slices are empty, of one element, or of many frames.
void expectReduced(int size, DType dtype, const Reduction& reduction, const std::vector<uint64_t>& sizes = kSizes,
                   size_t chunk_bytes = kMinChunkBytes) {
  Ranks ranks(size, [&](int, GroupConfig& config) { config.chunk_bytes = chunk_bytes; });
  std::vector<std::vector<Bytes>> data(size);
  const auto counters = ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
    std::vector<AllReduceMessage> messages;
    for (uint64_t elements : sizes)
      data[rank].push_back(contribution(dtype, elements, rank));
    for (size_t i = 0; i < sizes.size(); ++i)
      messages.push_back({sizes[i], CodecSpec{}, dtype, data[rank][i].data()});
    allReduce(op, messages, reduction);
  });
  uint64_t raw = 0, wanted_raw = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const Bytes wanted = expected(dtype, sizes[i], size, reduction);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_TRUE(data[rank][i] == wanted) << size << " ranks, rank " << rank << ", " << sizes[i] << " elements of "
                                           << dtypeName(dtype) << ", " << reduction.name();
    }
    // FORMAT.md, "Slices": these go whole to everybody.
    const uint64_t bytes = sizes[i] * itemBytes(dtype), w = static_cast<uint64_t>(size);
    const bool whole = w == 2 || (w > 1 && bytes <= 65536 && (w - 1) * (w - 2) * bytes <= w * 8192);
    wanted_raw += (whole ? w : 2) * (w - 1) * bytes;
  }
  for (const OpCounters& c : counters)
    raw += c.raw_bytes;
  EXPECT_EQ(raw, wanted_raw);
}

TEST(AllReduceExact, EveryTypeAndKind) {
  for (DType dtype : test::kAllTypes) {
    for (ReduceKind kind : {ReduceKind::sum, ReduceKind::product, ReduceKind::min, ReduceKind::max, ReduceKind::bit_and,
                            ReduceKind::bit_or, ReduceKind::bit_xor}) {
      if (reduceSupports(dtype, kind)) expectReduced(3, dtype, {kind});
    }
  }
}

TEST(AllReduceExact, EveryNumberOfRanks) {
  for (int size : {1, 2, 3, 5}) {
    expectReduced(size, DType::float32, {});
    expectReduced(size, DType::bfloat16, {ReduceKind::sum, /*average=*/true});
  }
}

// Slices of a few frames, which are full ones however few they are.
TEST(AllReduceExact, EveryLengthOfFrames) {
  for (int size : {2, 3, 4}) {
    for (size_t chunk_bytes : {kMinChunkBytes, size_t{256} << 10, kMaxChunkBytes})
      expectReduced(size, DType::float32, {}, {700'001, 3, 65'536}, chunk_bytes);
  }
}

TEST(AllReduceExact, RefusesAResidual) {
  Ranks ranks(2);
  std::vector<float> x(8), residual(8);
  for (const Outcome& outcome : ranks.run("all_reduce", [&](int, OpContext& op) {
         std::vector<float> mine = x;
         AllReduceMessage message{mine.size(), CodecSpec{}, DType::float32, mine.data()};
         message.tensors[0].residual = residual.data();
         allReduce(op, {message}, {});
       })) {
    EXPECT_TRUE(outcome.is<ValueError>()) << outcome.what();
  }
}

}  // namespace
}  // namespace lowcomm

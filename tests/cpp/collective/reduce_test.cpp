// reduce: the root has the bits of an exact all_reduce, and nobody else's tensor changes.
#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"
#include "collective/all_reduce.h"
#include "collective/collectives.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "kernels/reduce.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::holds;
using test::Ranks;

void expectAllReducesBits(int size, DType dtype, const Reduction& reduction, uint64_t n) {
  Ranks ranks(size);
  const int root = size / 2;
  std::vector<Bytes> mine, summed;
  for (int rank = 0; rank < size; ++rank)
    mine.push_back(test::randomTensor(dtype, n, static_cast<uint32_t>(n) * 8 + static_cast<uint32_t>(rank)));
  summed = mine;
  ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
    allReduce(op, {{n, CodecSpec{}, dtype, summed[rank].data()}}, reduction);
  });
  for (bool in_place : {true, false}) {
    std::vector<Bytes> inputs = mine;
    Bytes output(mine[0].size(), std::byte{0xdd});
    const auto counters = ranks.expectRun("reduce", [&](int rank, OpContext& op) {
      RootReduceMessage message{n, dtype, inputs[rank].data()};
      if (rank == root) message.output = in_place ? inputs[rank].data() : output.data();
      reduce(op, {message}, reduction, root);
    });
    for (int rank = 0; rank < size; ++rank) {
      const bool result = rank == root && in_place;
      EXPECT_TRUE(inputs[rank] == (result ? summed[root] : mine[rank]))
          << size << " ranks, rank " << rank << ", " << n << " of " << dtypeName(dtype) << " " << reduction.name();
    }
    if (!in_place) EXPECT_TRUE(output == summed[root]) << size << " ranks, " << n << " of " << dtypeName(dtype);
    uint64_t raw = 0;
    for (const OpCounters& c : counters)
      raw += c.raw_bytes;
    // Every share once, and every sum that the root does not have.
    EXPECT_LE(raw, 2 * static_cast<uint64_t>(size - 1) * n * itemBytes(dtype));
    EXPECT_GE(raw, static_cast<uint64_t>(size - 1) * n * itemBytes(dtype));
  }
}

TEST(Reduce, EveryTypeAndKind) {
  for (DType dtype : test::kAllTypes) {
    for (ReduceKind kind : {ReduceKind::sum, ReduceKind::product, ReduceKind::min, ReduceKind::max, ReduceKind::bit_and,
                            ReduceKind::bit_or, ReduceKind::bit_xor}) {
      if (reduceSupports(dtype, kind)) expectAllReducesBits(3, dtype, {kind}, 5000);
    }
  }
}

TEST(Reduce, EveryNumberOfRanksAndSize) {
  for (int size : {1, 2, 4, 5}) {
    for (uint64_t n : {0, 1, 2, 511, 513, 200000}) {
      expectAllReducesBits(size, DType::float32, {}, n);
      expectAllReducesBits(size, DType::bfloat16, {ReduceKind::sum, /*average=*/true}, n);
    }
  }
}

TEST(Reduce, RanksThatDifferAreNamed) {
  Ranks ranks(3);
  std::vector<std::vector<float>> x(3, std::vector<float>(100));
  const auto roots = ranks.run("reduce", [&](int rank, OpContext& op) {
    reduce(op, {{100, DType::float32, x[rank].data(), x[rank].data()}}, {}, rank == 2 ? 1 : 0);
  });
  for (const auto& outcome : roots)
    EXPECT_TRUE(outcome.is<PeerRefusal>() && holds(outcome.what(), {"root", "'1'"})) << outcome.what();
  const auto kinds = ranks.run("reduce", [&](int rank, OpContext& op) {
    reduce(op, {{100, DType::float32, x[rank].data(), x[rank].data()}}, {rank == 1 ? ReduceKind::max : ReduceKind::sum},
           0);
  });
  for (const auto& outcome : kinds)
    EXPECT_TRUE(outcome.is<PeerRefusal>() && holds(outcome.what(), {"reduce op", "max"})) << outcome.what();
}

}  // namespace
}  // namespace lowcomm

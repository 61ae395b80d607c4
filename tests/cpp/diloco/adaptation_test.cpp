#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "diloco_ranks.h"

namespace lowcomm {
namespace {

using namespace test;

constexpr int64_t kRank = 8, kEvery = 16, kRows = 48, kColumns = 64;

// Orthonormal columns.
at::Tensor directions(int64_t length, uint64_t seed) {
  const at::Tensor q = std::get<0>(at::linalg_qr(Trainee::noise({length, kRank}, seed)));
  return q.contiguous();
}

struct Ended {
  std::vector<double> ranks, effective;  // r_t and r'_t with which each part of the training ends
  std::vector<int64_t> intervals;
  std::vector<at::Tensor> outer;
};

// Every inner step moves a matrix along as many directions as `widths` says, all by the same, and along random ones by
// little: parts of so many inner steps, one after the other.
std::vector<Ended> train(int size, const DiLoCoXOptions& o, const std::vector<int64_t>& widths, int64_t steps) {
  Ranks ranks(size);
  std::vector<Ended> ended(size);
  const at::Tensor left = directions(kRows, 1), right = directions(kColumns, 2);
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, {{kRows, kColumns}, {30}});
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
    uint64_t step = 0;
    for (int64_t width : widths) {
      const at::Tensor moves = left.narrow(1, 0, width).matmul(right.narrow(1, 0, width).t());
      for (const uint64_t end = step + static_cast<uint64_t>(steps); step < end; ++step) {
        at::Tensor& matrix = trainee.parameters[0].tensor;
        matrix.sub_(moves * 0.1).sub_(Trainee::noise({kRows, kColumns}, 10 * step + rank) * 1e-5);
        trainee.parameters[1].tensor.sub_(0.01);
        trainee.loop->step();
      }
      ended[rank].ranks.push_back(trainee.loop->report().rank);
      ended[rank].effective.push_back(trainee.loop->report().effective_rank);
      ended[rank].intervals.push_back(trainee.loop->report().sync_every);
    }
    ended[rank].outer = trainee.outer();
  });
  for (const Ended& one : ended) {
    EXPECT_EQ(one.ranks, ended[0].ranks);
    EXPECT_EQ(one.effective, ended[0].effective);
    EXPECT_EQ(one.intervals, ended[0].intervals);
    for (size_t i = 0; i < one.outer.size(); ++i)
      EXPECT_TRUE(at::equal(one.outer[i], ended[0].outer[i]));
  }
  return ended;
}

DiLoCoXOptions adaptive(OuterMode mode, bool feedback) {
  DiLoCoXOptions o = coded(options(kEvery, mode), "sym8:bucket=64", kRank, feedback);
  o.adapt_rank = o.adapt_sync_every = true;
  return o;
}

// r_t falls to what the spectrum has, and H_t with it; an average of few directions never shows more again.
TEST(Adaptation, RankAndIntervalFallWithTheSpectrum) {
  for (OuterMode mode : {OuterMode::sync, OuterMode::proceed}) {
    for (bool feedback : {false, true}) {
      for (int size : {1, 2, 3}) {
        const Ended ended = train(size, adaptive(mode, feedback), {kRank, 2, kRank}, 12 * kEvery)[0];
        const std::string what =
            std::string(outerModeName(mode)) + (feedback ? ", residual, " : ", ") + std::to_string(size) + " ranks";
        EXPECT_GE(ended.ranks[0], kRank - 1) << what;
        EXPECT_LE(ended.ranks[1], 3) << what;
        EXPECT_GE(ended.ranks[1], 1) << what;
        EXPECT_LE(ended.ranks[2], std::ceil(ended.ranks[1])) << what;
        for (size_t part = 0; part < 3; ++part) {
          const int64_t interval = std::llround(kEvery * ended.ranks[part] / kRank);
          EXPECT_EQ(ended.intervals[part], std::max(kEvery / 4, interval)) << what;
        }
      }
    }
  }
}

// A matrix that nobody moves, as a frozen one, says nothing of the others.
TEST(Adaptation, WhatDoesNotMoveSaysNothing) {
  DiLoCoXOptions o = adaptive(OuterMode::sync, /*feedback=*/true);
  Ranks ranks(2);
  std::vector<double> effective(2);
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, {{kRows, kColumns}, {kRows, kColumns}});
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
    for (int64_t step = 0; step < kEvery; ++step) {
      trainee.parameters[0].tensor.sub_(1);
      trainee.loop->step();
    }
    effective[rank] = trainee.loop->report().effective_rank;
  });
  EXPECT_EQ(effective[0], 1);
  EXPECT_EQ(effective[1], 1);
}

}  // namespace
}  // namespace lowcomm

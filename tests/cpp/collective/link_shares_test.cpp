// Slices by the speed of links: their lengths, when they change, and an all_reduce by them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collective/all_reduce.h"
#include "collective/link_shares.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "forwarding_transport.h"
#include "ranks_on_threads.h"
#include "staged_cases.h"

namespace lowcomm {
namespace {

using namespace test;
using Numbers = std::vector<uint64_t>;

// What ranks of these rates tell each other: each sends all others a part of what it can.
std::vector<Numbers> matrixOf(const Numbers& rates) {
  const size_t ranks = rates.size();
  std::vector<Numbers> told(ranks, Numbers(ranks));
  for (size_t i = 0; i < ranks; ++i) {
    for (size_t j = 0; j < ranks; ++j)
      if (i != j) told[i][j] = std::min(rates[i], rates[j]) / (ranks - 1);
  }
  return told;
}

// The time that a tensor of one byte takes, by shares in these proportions.
double timeOf(const std::vector<double>& rates, const std::vector<double>& parts) {
  const double all = std::accumulate(parts.begin(), parts.end(), 0.0);
  double time = 0;
  for (size_t i = 0; i < rates.size(); ++i)
    time = std::max(time, (1 + static_cast<double>(rates.size() - 2) * parts[i] / all) / rates[i]);
  return time;
}

TEST(LinkShares, NoSharesTakeLessTime) {
  std::mt19937 random(3);
  for (int turn = 0; turn < 200; ++turn) {
    const size_t ranks = 3 + turn % 4;
    std::vector<Numbers> told(ranks, Numbers(ranks));
    for (auto& row : told)
      std::ranges::generate(row, [&] { return 1000 + random() % 20000; });
    std::vector<double> rates;
    for (size_t i = 0; i < ranks; ++i) {
      uint64_t sent = 0, received = 0;
      for (size_t j = 0; j < ranks; ++j) {
        sent += i == j ? 0 : told[i][j];
        received += i == j ? 0 : told[j][i];
      }
      rates.push_back(static_cast<double>(std::min(sent, received)));
    }
    LinkShares links(static_cast<int>(ranks));
    links.agree(told);
    if (links.weights().empty()) continue;
    const double time = timeOf(rates, std::vector<double>(links.weights().begin(), links.weights().end()));
    EXPECT_LE(time, timeOf(rates, std::vector<double>(ranks, 1)));
    for (int other = 0; other < 100; ++other) {
      std::vector<double> parts(ranks);
      std::ranges::generate(parts, [&] { return std::exponential_distribution<>()(random); });
      EXPECT_LE(time, timeOf(rates, parts) * (1 + 1e-9));
    }
  }
}

TEST(LinkShares, OneAtAFifthSumsNothing) {
  for (size_t ranks : {3, 4}) {
    Numbers rates(ranks, 10000);
    rates[1] = 2000;
    LinkShares links(static_cast<int>(ranks));
    links.agree(matrixOf(rates));
    ASSERT_EQ(links.weights().size(), ranks);
    EXPECT_EQ(links.weights()[1], 0u);
    EXPECT_GT(links.weights()[0], 0u);
  }
}

TEST(LinkShares, ChangeWhereARateHasChangedByAQuarter) {
  LinkShares links(3);
  links.agree(matrixOf({10000, 9000, 8500}));
  EXPECT_TRUE(links.weights().empty()) << "about equal";
  links.agree(matrixOf({10000, 9000, 7000}));
  EXPECT_TRUE(links.weights().empty()) << "no quarter less";
  links.agree(matrixOf({10000, 9000, 2000}));
  const Numbers weights = links.weights();
  ASSERT_EQ(weights.size(), 3u);
  links.agree(matrixOf({10000, 9000, 2300}));
  EXPECT_EQ(links.weights(), weights);
  std::vector<Numbers> unknown = matrixOf({10000, 10000, 10000});
  unknown[2][0] = 0;
  links.agree(unknown);
  EXPECT_EQ(links.weights(), weights);
  links.agree(matrixOf({10000, 10000, 10000}));
  EXPECT_TRUE(links.weights().empty());
}

ConnectionReport carried(int peer, uint64_t bytes, double busy_s, int number = 0) {
  ConnectionReport report{.peer = peer, .lane = Lane::bulk, .number = number};
  report.acknowledged_bytes = bytes;
  report.busy_s = busy_s;
  return report;
}

TEST(LinkShares, MeasureWhatConnectionsCarryWhileTheyAreBusy) {
  constexpr uint64_t kMiB = 1 << 20;
  LinkShares links(3);
  EXPECT_EQ(links.text(), "");
  links.measure({carried(1, 4 * kMiB, 0.4), carried(2, kMiB, 0.1)});
  EXPECT_EQ(links.text(), "") << "not for long enough";
  links.measure({carried(1, 8 * kMiB, 1), carried(2, 2 * kMiB, 0.5), carried(2, 2 * kMiB, 0.5, 1)});
  EXPECT_EQ(links.text(), "0 8193 8193") << "two connections of a peer are busy at once";
  links.measure({carried(1, 12 * kMiB, 2), carried(2, 2 * kMiB, 0.5), carried(2, 2 * kMiB, 0.5, 1)});
  EXPECT_EQ(links.text(), "0 6145 8193") << "half of it is new";
  links.measure({carried(1, 2 * kMiB, 1), carried(2, 2 * kMiB, 0.5), carried(2, 2 * kMiB, 0.5, 1)});
  EXPECT_EQ(links.text(), "0 4097 8193") << "connected again";
  LinkShares equal(3, true);
  equal.measure({carried(1, 8 * kMiB, 1), carried(2, 8 * kMiB, 1)});
  EXPECT_EQ(equal.text(), "");
}

TEST(LinkShares, ReadAPeersNumbers) {
  EXPECT_EQ(LinkShares::parse("0 12 345", 3), (Numbers{0, 12, 345}));
  for (const char* text : {"", "1 2", "1 2 3 4", "1 2 x", "1 2 -3", "1  2 3", "1 2 99999999999", "1 2 3 "})
    EXPECT_THROW(LinkShares::parse(text, 3), WireError) << text;
}

TEST(Slices, AreInProportionToWeights) {
  const CodecSpec codec = CodecSpec::parse("sym4:bucket=1024");
  EXPECT_EQ(slicesOf(10 * 1024, codec, 3, {2, 0, 3}), (std::vector<Slice>{{0, 4096}, {4096, 0}, {4096, 6144}}));
  for (uint64_t n : {0, 1, 1000, 1024, 5000, 1000003}) {
    const auto slices = slicesOf(n, codec, 4, {123456789, 1, 987654321, 0});
    uint64_t first = 0;
    for (const Slice& slice : slices) {
      EXPECT_EQ(slice.first, first);
      first += slice.count;
      EXPECT_TRUE(first == n || first % 1024 == 0) << n;
    }
    EXPECT_EQ(first, n);
  }
}

// Phases that only have rounds; frame k of the second one needs round k of the first.
struct Rounds final : Phase {
  Rounds(const MessagePlan& plan, bool second, bool turns) : is_second(second) {
    out = {&plan};
    takes_turns = turns;
  }
  size_t readyAfter(size_t k) const override { return is_second ? k + 1 : 0; }
  void encode(size_t, int, std::span<std::byte>) override {}
  void absorb(size_t, const Payloads&) override {}
  const bool is_second;
};

TEST(RoundsOf, PhasesThatTakeTurns) {
  const MessagePlan plan = planMessage(single(3 * 16384, "none"), DType::float32, kMinChunkBytes);
  for (const bool turns : {false, true}) {
    Rounds first(plan, false, false), second(plan, true, turns), third(plan, false, false);
    std::vector<std::tuple<const Phase*, size_t, size_t>> rounds;
    for (const Round& round : roundsOf({&first, &second, &third}))
      rounds.emplace_back(round.phase, round.k, round.needs);
    const std::vector<std::tuple<const Phase*, size_t, size_t>> after = {
        {&first, 0, 0},  {&first, 1, 0}, {&first, 2, 0}, {&second, 0, 1}, {&second, 1, 2},
        {&second, 2, 3}, {&third, 0, 0}, {&third, 1, 0}, {&third, 2, 0}};
    const std::vector<std::tuple<const Phase*, size_t, size_t>> by_turns = {
        {&first, 0, 0},  {&first, 1, 0}, {&second, 0, 1}, {&first, 2, 0}, {&second, 1, 2},
        {&second, 2, 4}, {&third, 0, 0}, {&third, 1, 0},  {&third, 2, 0}};
    EXPECT_EQ(rounds, turns ? by_turns : after);
  }
}

// Its rank's link to every other one carries so many MiB a second.
class RatedTransport final : public ForwardingTransport {
 public:
  RatedTransport(std::unique_ptr<Transport> inner, uint64_t rate)
      : ForwardingTransport(std::move(inner)), rate_(rate) {}
  std::vector<ConnectionReport> report() const override {
    ++reports_;
    std::vector<ConnectionReport> reports;
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank()) reports.push_back(carried(peer, reports_ * (rate_ << 20), static_cast<double>(reports_)));
    return reports;
  }

 private:
  const uint64_t rate_;
  mutable uint64_t reports_ = 0;
};

double distance(const Bytes& x, const Bytes& y) {
  const auto* const a = reinterpret_cast<const float*>(x.data());
  const auto* const b = reinterpret_cast<const float*>(y.data());
  double off = 0, whole = 0;
  for (size_t i = 0; i < x.size() / 4; ++i) {
    off += (a[i] - b[i]) * (a[i] - b[i]);
    whole += b[i] * b[i];
  }
  return std::sqrt(off / whole);
}

// The first op measures, the second one tells, the third one is cut by it: the slow rank sends as much as it must.
// Exact elements have the bits that equal slices give; codes differ where another rank's share is not encoded.
TEST(LinkShares, AnAllReduceIsCutByThem) {
  constexpr uint64_t kElements = 1 << 20;
  for (const char* codec : {"none", "sym4:bucket=1024"}) {
    MemoryHub hub(3);
    Ranks ranks(3, nullptr,
                [&](int rank) { return std::make_unique<RatedTransport>(hub.transport(rank), rank == 1 ? 2 : 10); });
    std::vector<Bytes> first;
    std::vector<std::vector<uint64_t>> sent;
    for (int op = 0; op < 3; ++op) {
      std::vector<Bytes> data;
      for (int rank = 0; rank < 3; ++rank)
        data.push_back(randomTensor(DType::float32, kElements, rank));
      const auto counters = ranks.expectRun("all_reduce", [&](int rank, OpContext& context) {
        allReduce(context, {{kElements, CodecSpec::parse(codec), DType::float32, data[rank].data()}}, {});
      });
      EXPECT_TRUE(data[0] == data[1] && data[0] == data[2]);
      if (op == 0) first = data;
      EXPECT_TRUE(data == first || (op == 2 && codec != std::string("none"))) << "the bits of equal slices";
      EXPECT_LT(distance(data[0], first[0]), 0.2);
      sent.emplace_back();
      for (const OpCounters& counter : counters)
        sent.back().push_back(counter.wire_bytes);
    }
    const auto whole = static_cast<double>(sent[0][1]) * 3 / 4;  // of a tensor
    EXPECT_NEAR(static_cast<double>(sent[1][1]), static_cast<double>(sent[0][1]), 2000);
    EXPECT_NEAR(static_cast<double>(sent[2][1]), whole, 0.02 * whole) << codec;
    EXPECT_NEAR(static_cast<double>(sent[2][0]), 1.5 * whole, 0.02 * whole) << codec;
  }
}

// Messages together: one of two tensors whose slices begin at other ranks, one that cannot be cut, whose slices stay
// equal, and one that travels whole.
TEST(LinkShares, CutSeveralMessages) {
  MemoryHub hub(4);
  Ranks ranks(4, nullptr,
              [&](int rank) { return std::make_unique<RatedTransport>(hub.transport(rank), rank == 2 ? 3 : 10); });
  const CodecSpec coded = CodecSpec::parse("sym8:bucket=1024"), uncut = CodecSpec::parse("topk:keep=0.5");
  Bytes first_uncut;
  for (int op = 0; op < 4; ++op) {
    constexpr uint64_t kSizes[] = {300'000, 200'003, 70'001, 50'000, 100};
    std::vector<std::vector<Bytes>> data(4);
    for (int rank = 0; rank < 4; ++rank)
      for (const uint64_t size : kSizes)
        data[rank].push_back(randomTensor(DType::float32, size, rank));
    ranks.expectRun("all_reduce", [&](int rank, OpContext& context) {
      std::vector<Bytes>& mine = data[rank];
      std::vector<ReduceTensor> two = {{kSizes[1], mine[1].data()}, {kSizes[2], mine[2].data()}};
      two[1].slot = 4;
      two[1].first_owner = 3;
      std::vector<AllReduceMessage> messages = {{kSizes[0], {}, DType::float32, mine[0].data()},
                                                {coded, DType::float32, {}, two},
                                                {kSizes[3], uncut, DType::float32, mine[3].data()},
                                                {kSizes[4], {}, DType::float32, mine[4].data()}};
      allReduce(context, messages, {});
    });
    if (op == 0) first_uncut = data[0][3];
    EXPECT_TRUE(data[0][3] == first_uncut);
    for (size_t t = 0; t < std::size(kSizes); ++t) {
      Bytes sum = randomTensor(DType::float32, kSizes[t], 0);
      for (int rank = 1; rank < 4; ++rank) {
        const Bytes more = randomTensor(DType::float32, kSizes[t], rank);
        for (size_t i = 0; i < kSizes[t]; ++i)
          reinterpret_cast<float*>(sum.data())[i] += reinterpret_cast<const float*>(more.data())[i];
      }
      EXPECT_LT(distance(data[0][t], sum), t == 3 ? 0.6 : t == 0 || t == 4 ? 1e-6 : 0.02) << op << ", tensor " << t;
      for (int rank = 1; rank < 4; ++rank)
        EXPECT_TRUE(data[rank][t] == data[0][t]) << op << ", tensor " << t;
    }
  }
  EXPECT_FALSE(ranks.engine(0).group().links.weights().empty());
}

// Elements on a device of some ranks, of all, or of none: the same bits.
TEST(LinkShares, CutADevicesElements) {
  constexpr uint64_t kElements = 1'000'001;
  std::vector<Bytes> of_hosts;
  for (const Staging staging : {kNobody, kAll, kEven}) {
    MemoryHub hub(3);
    Ranks ranks(3, nullptr,
                [&](int rank) { return std::make_unique<RatedTransport>(hub.transport(rank), rank == 0 ? 2 : 10); });
    std::vector<Bytes> data;
    for (int op = 0; op < 4; ++op) {
      data.clear();
      for (int rank = 0; rank < 3; ++rank)
        data.push_back(randomTensor(DType::float32, kElements, rank));
      ranks.expectRun("all_reduce", on(staging, [&](int rank, OpContext& context, DeviceCodec* device_codec) {
                        const CodecSpec codec = CodecSpec::parse("sym4:bucket=512");
                        allReduce(context, {{kElements, codec, DType::float32, data[rank].data()}}, kAverage,
                                  device_codec);
                      }));
    }
    EXPECT_FALSE(ranks.engine(0).group().links.weights().empty());
    EXPECT_TRUE(data[0] == data[1] && data[0] == data[2]);
    if (staging == kNobody) of_hosts = data;
    EXPECT_TRUE(data == of_hosts) << staging;
  }
}

}  // namespace
}  // namespace lowcomm

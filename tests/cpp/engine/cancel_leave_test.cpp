#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "ranks_on_threads.h"
#include "transport/tcp_ranks.h"

// Ops that are given up while a peer is silent, and what a rank then does to leave.

namespace lowcomm {
namespace {

using test::Outcome;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kProgress{60}, kSoon{10};

void keepDeadline(int, GroupConfig& config) {
  config.timeout = kProgress;
}

// An op that one rank gives up while the other hears nothing.
std::vector<Outcome> giveUpAlone(test::Ranks& ranks, const std::string& why) {
  std::vector<std::byte> room(100);
  std::vector<std::future<Outcome>> pending;
  pending.push_back(ranks.start(0, "one-sided", [&](int, OpContext& op) {
    const auto coming = op.begin(1, [&] { return op.group.transport.irecv(Lane::bulk, 1, op.first_tag, room); });
    op.wait(*coming, 1, "waiting for what does not come");
  }));
  ranks.hub().stall(1);
  EXPECT_TRUE(ranks.engine(0).cancel(1, why));
  return ranks.finish(std::move(pending));
}

TEST(CancelLeave, APeerThatIsSilentHoldsNobodyWhoLeaves) {
  test::Ranks ranks(2, keepDeadline);
  const auto outcomes = giveUpAlone(ranks, "it is silent");
  EXPECT_TRUE(outcomes[0].is<PeerRefusal>()) << outcomes[0].what();
  const auto before = Clock::now();
  ranks.engine(0).shutdown();
  EXPECT_LT(Clock::now() - before, kSoon);
}

TEST(CancelLeave, NorAGroupThatIsOver) {
  test::Ranks ranks(2, keepDeadline);
  giveUpAlone(ranks, "it is silent");
  const auto before = Clock::now();
  std::vector<std::future<Outcome>> pending;
  pending.push_back(ranks.start(0, "the next", [](int, OpContext&) {}));
  ranks.engine(0).abort("enough");
  EXPECT_FALSE(ranks.finish(std::move(pending))[0].ok());
  ranks.engine(0).shutdown();
  EXPECT_LT(Clock::now() - before, kSoon);
}

// A reason is cut where a character ends, so that every rank can show it.
TEST(CancelLeave, TheReasonIsWholeCharacters) {
  test::Ranks ranks(2, keepDeadline);
  std::string why;
  for (size_t i = 0; i < kMaxErrorText; ++i)
    why += "\u20ac";
  const std::string what = giveUpAlone(ranks, why)[0].what();
  const size_t characters = kMaxErrorText / 3;
  EXPECT_NE(what.find(": " + why.substr(0, 3 * characters) + " ["), std::string::npos) << what;
}

}  // namespace
}  // namespace lowcomm

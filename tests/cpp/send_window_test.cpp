#include "collective/send_window.h"

#include <gtest/gtest.h>

#include <initializer_list>

namespace lowcomm {
namespace {

void wait(SendWindow& window, std::initializer_list<double> ms, int times) {
  for (int i = 0; i < times; ++i) {
    for (double each : ms)
      window.waited(std::chrono::nanoseconds(static_cast<int64_t>(each * 1e6)));
  }
}

TEST(SendWindow, StaysWhereALinkIsBusy) {
  for (int peers : {1, 3}) {
    SendWindow window(peers);
    const size_t first = window.rounds();
    EXPECT_EQ(first, peers == 1 ? 4u : 2u);
    wait(window, {5, 5.5, 4, 6, 7, 5, 3.5, 5}, 50);
    EXPECT_EQ(window.rounds(), first);
    wait(window, {0.01, 0.4, 0.02, 0.01, 0.03, 0.01, 0.5, 0.01}, 50);  // faster than anybody can tell
    EXPECT_EQ(window.rounds(), first);
  }
}

// A link whose frames take 5 ms and whose delay is so long that a window of them has to wait for its answer.
TEST(SendWindow, GrowsWhereALinkIsIdle) {
  SendWindow window(1);
  wait(window, {35, 5, 5, 5}, 2);
  EXPECT_EQ(window.rounds(), 8u);
  wait(window, {30, 5, 5, 5, 5, 5, 5, 5}, 50);  // busy two thirds of the time
  EXPECT_EQ(window.rounds(), 8u);
  wait(window, {60, 5, 5, 5, 5, 5, 5, 5}, 50);
  EXPECT_EQ(window.rounds(), SendWindow::kMost);
}

}  // namespace
}  // namespace lowcomm

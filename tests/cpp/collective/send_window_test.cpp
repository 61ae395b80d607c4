#include "collective/context.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>

namespace lowcomm {
namespace {

std::chrono::nanoseconds milliseconds(double ms) {
  return std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6));
}

void wait(SendWindow& window, std::initializer_list<double> ms, int times) {
  for (int i = 0; i < times; ++i) {
    for (double each : ms)
      window.waited(milliseconds(each), 65536);
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

// A link whose frames take `frame` ms each, and whose delay is `delay`: the first of a window's frames answers what was
// sent that long ago.
void useLink(SendWindow& window, double frame, double delay, int rounds) {
  for (int r = 0; r < rounds;) {
    const int ahead = static_cast<int>(window.rounds());
    for (int i = 0; i < ahead; ++i, ++r)
      window.waited(milliseconds(i > 0 ? frame : std::max(frame, delay + 2 * frame - ahead * frame)), 65536);
  }
}

TEST(SendWindow, GrowsWithTheDelay) {
  const auto after = [](int peers, double delay) {
    SendWindow window(peers);
    useLink(window, 5, delay, 200);
    return window.rounds();
  };
  EXPECT_EQ(after(1, 1), 4u);
  EXPECT_EQ(after(1, 40), 8u);
  EXPECT_EQ(after(1, 400), SendWindow::kMost);
  EXPECT_EQ(after(3, 1), 2u);
  EXPECT_EQ(after(3, 400), SendWindow::kMost);
}

// Waits that are uneven whatever the window: it is tried, ever more seldom, and given up each time.
TEST(SendWindow, ReturnsWhereMoreIsNotFaster) {
  SendWindow window(3);
  int tried = 0;
  for (int i = 0; i < 1000; ++i) {
    wait(window, {60, 1, 1, 1, 60, 1, 1, 1}, 1);
    tried += window.rounds() > 2;
  }
  EXPECT_GT(tried, 0);
  EXPECT_LT(tried, 30);
}

}  // namespace
}  // namespace lowcomm

#include "wire/layout.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/hashes.h"
#include "errors.h"

namespace lowcomm {
namespace {

const CodecSpec kNone;
const CodecSpec kGrid{CodecId::minmax, 8, 1024};

TEST(Layout, MergesDropsAndHashes) {
  const Layout layout({{0, 10, kNone}, {10, 0, kGrid}, {10, 5, kNone}, {15, 100, kGrid}, {115, 100, kGrid}});
  EXPECT_EQ(layout.text(), "0 15 none\n15 100 minmax8:bucket=1024\n115 100 minmax8:bucket=1024\n");
  EXPECT_EQ(layout.elements(), 215u);
  EXPECT_EQ(layout.segments().size(), 3u);
  EXPECT_EQ(Layout::parse(layout.text()).segments(), layout.segments());
  EXPECT_EQ(Layout::parse(layout.text()).hash(), layout.hash());
  EXPECT_NE(Layout::single(215, kGrid).hash(), layout.hash());
  EXPECT_EQ(Layout::single(0, kGrid).text(), "");
  // FNV-1a of the empty text and of "a", from its authors' test suite.
  EXPECT_EQ(Layout::single(0, kGrid).hash(), 0xcbf29ce484222325u);
  static_assert(fnv1a("a") == 0xaf63dc4c8601ec8cu);
  uint64_t hash = 0xcbf29ce484222325u;
  for (unsigned char c : layout.text())
    hash = (hash ^ c) * 0x100000001b3u;
  EXPECT_EQ(layout.hash(), hash);
}

TEST(Layout, TablesAreInTheTextAndTheHash) {
  const CodecSpec levels{CodecId::levels, 2, 1024};
  const LevelTable even = LevelTable::even(2), older({0, 0.25f, 0.5f, 1}, 2), newer({0.125f, 0.25f, 0.5f, 1}, 3);
  const Layout layout({{0, 10, kNone}, {10, 100, levels, newer}, {110, 50, levels, older}, {160, 5, kGrid}});
  EXPECT_EQ(layout.text(),
            "0 10 none\n10 100 levels2:bucket=1024 3:0.125,0.25,0.5,1\n110 50 levels2:bucket=1024 2:0,0.25,0.5,1\n"
            "160 5 minmax8:bucket=1024\n");
  EXPECT_EQ(layout.stateVersion(), 3u);
  EXPECT_EQ(Layout::parse(layout.text()).segments(), layout.segments());
  EXPECT_NE(Layout({{0, 10, levels, even}}).hash(), Layout({{0, 10, levels, older}}).hash());
  EXPECT_EQ(makeCodec(layout.segments()[1])->stateVersion(), 3u);
  EXPECT_EQ(Layout({{0, 10, kGrid}}).stateVersion(), 0u);
  EXPECT_THROW(Layout({{0, 10, kGrid, even}}), ValueError);
  EXPECT_THROW(Layout({{0, 10, levels, LevelTable::even(3)}}), ValueError);
  EXPECT_THROW(Layout::parse("0 10 levels2:bucket=1024 3:0,0.25\n"), ValueError);
}

TEST(Layout, RefusesGapsAndOverlaps) {
  const struct {
    std::vector<Segment> segments;
    const char* part;
  } cases[] = {
      {{{1, 10, kNone}}, "gap"},
      {{{0, 10, kNone}, {11, 5, kGrid}}, "'11 5 minmax8:bucket=1024'"},
      {{{0, 10, kNone}, {9, 5, kGrid}}, "overlap"},
      {{{0, ~uint64_t{0}, kNone}, {~uint64_t{0}, 5, kGrid}}, "2^64"},
      {{{0, 10, {CodecId::layout, 0, 0}}}, "codec of elements"},
  };
  for (const auto& c : cases) {
    EXPECT_TRUE(test::holds(test::thrownBy<ValueError>([&] { Layout layout(c.segments); }), {c.part}));
  }
}

TEST(Layout, RefusesTextThatIsNone) {
  for (const char* text : {"x", "0 10 none", "0 none\n", "0 10\n", "0 10 \n", " 0 10 none\n", "0 -1 none\n",
                           "0 10 nine\n", "0 99999999999999999999999 none\n", "\n", "0 10  none\n"}) {
    EXPECT_THROW(Layout::parse(text), ValueError) << text;
  }
}

TEST(Layout, ChannelsNeedTheirNumberAndWholeRows) {
  const auto refusal = [](uint64_t count, const char* codec) {
    return test::thrownBy<ValueError>([&] { Layout::single(count, CodecSpec::parse(codec)); });
  };
  EXPECT_NE(refusal(100, "sym4:axis=channel").find("'0 100 sym4:axis=channel': expected a codec whose number"),
            std::string::npos);
  EXPECT_NE(refusal(100, "sym4:axis=channel,C=16").find("expected a multiple of 16 elements, got 100"),
            std::string::npos);
  EXPECT_EQ(refusal(96, "sym4:axis=channel,C=16"), test::kNothing);
  const Layout layout = Layout::single(96, CodecSpec::parse("sym4:axis=channel,C=16"));
  EXPECT_EQ(Layout::parse(layout.text()).segments(), layout.segments());
}

}  // namespace
}  // namespace lowcomm

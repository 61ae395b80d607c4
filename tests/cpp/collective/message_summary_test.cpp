#include "collective/message_summary.h"

#include <gtest/gtest.h>

#include "base/hashes.h"
#include "collective/plan.h"
#include "collective_cases.h"

namespace lowcomm {
namespace {

using test::single;

MessagePlan planOf(const Layout& layout, DType dtype) {
  return planMessage(layout, dtype, kMinChunkBytes);
}

TEST(Describe, OneMessage) {
  EXPECT_EQ(describe("all_gather", {planOf(single(1000, "qsgd4"), DType::bfloat16)}).text(),
            "op=all_gather\ntensors=1\ndtype=bfloat16\nelements a rank=1000\ncodec=qsgd4:bucket=1024\n");
  EXPECT_EQ(describe("all_gather", {planOf(single(0, "qsgd4"), DType::float32)}).text(),
            "op=all_gather\ntensors=1\ndtype=float32\nelements a rank=0\ncodec=none\n");
  EXPECT_EQ(describe("all_gather", {}).text(), "op=all_gather\ntensors=0\ndtype=\nelements a rank=\ncodec=\n");
}

TEST(Describe, EqualValuesAreOne) {
  const MessagePlan a = planOf(single(10, "none"), DType::float32), b = planOf(single(20, "none"), DType::float32);
  EXPECT_EQ(describe("all_gather", {a, b, b}).text(),
            "op=all_gather\ntensors=3\ndtype=float32\nelements a rank=10,20,20\ncodec=none\n");
}

TEST(Describe, LayoutsByTheirHash) {
  const Layout layout({{0, 10, CodecSpec::parse("none")}, {10, 5, CodecSpec::parse("minmax8")}});
  EXPECT_EQ(describe("all_gather", {planOf(layout, DType::float32)}).fields.back().second,
            "layout of 2 segments, hash " + std::to_string(layout.hash()));
}

TEST(Describe, TablesByTheirVersion) {
  const CodecSpec levels = CodecSpec::parse("levels2:bucket=64");
  const Layout one({{0, 10, levels, LevelTable({0, 0.25f, 0.5f, 1}, 4)}});
  EXPECT_EQ(describe("all_gather", {planOf(one, DType::float32)}).fields.back().second,
            "levels2:bucket=64, levels of version 4");
  const Layout two({{0, 10, levels, LevelTable::even(2)}, {10, 5, CodecSpec::parse("none")}});
  EXPECT_EQ(describe("all_gather", {planOf(two, DType::float32)}).fields.back().second,
            "layout of 2 segments, hash " + std::to_string(two.hash()) + ", levels of version 0");
}

TEST(Describe, TheCallersTypeStandsForOpaqueBytes) {
  MessageSummary carried = planOf(single(8, "none"), DType::opaque);
  EXPECT_EQ(describe("all_gather", {carried}).text(),
            "op=all_gather\ntensors=1\ndtype=opaque\nelements a rank=8\ncodec=none\n");
  carried.dtype = "uint16";
  carried.elements = "4";
  EXPECT_EQ(describe("all_gather", {carried, planOf(single(8, "none"), DType::uint8)}).text(),
            "op=all_gather\ntensors=2\ndtype=uint16,uint8\nelements a rank=4,8\ncodec=none\n");
}

TEST(Describe, LongListsAreCutAndClosedWithTheirHash) {
  for (uint64_t tensors : {uint64_t{400}, uint64_t{401}}) {
    std::vector<MessageSummary> plans;
    std::string list;
    for (uint64_t i = 0; i < tensors; ++i) {
      const uint64_t n = i == 400 ? 1 : 1000 + i;  // 400 of them make 1,999 characters, one more 2,001
      plans.push_back(planOf(single(n, "none"), DType::int8));
      list += (i ? "," : "") + std::to_string(n);
    }
    EXPECT_EQ(list.size(), tensors == 400 ? 1999u : 2001u);
    EXPECT_EQ(describe("all_gather", plans).fields[3].second,
              tensors == 400 ? list : list.substr(0, 2000) + "... hash " + std::to_string(fnv1a(list)));
  }
}

}  // namespace
}  // namespace lowcomm

// How long frames are, and their headers. Which elements each frame has is filling_test.cpp's.
#include "collective/plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "collective_cases.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using test::mixedLayout;
using test::single;

// A link is idle while a first frame is encoded and a last one is decoded: of a short message these are short.
TEST(Plan, EncodedMessagesHaveManyFrames) {
  const auto frames = [](uint64_t mib, size_t chunk_bytes, const char* codec = "fp16") {
    return planMessage(single(mib << 19, codec), DType::float32, chunk_bytes).frames.size();
  };
  EXPECT_EQ(frames(1, 256 << 10), 16u);  // none is shorter than 64 KiB
  EXPECT_EQ(frames(2, 256 << 10), 32u);
  EXPECT_EQ(frames(4, 256 << 10), 32u);
  EXPECT_EQ(frames(8, 256 << 10), 32u);
  EXPECT_EQ(frames(16, 256 << 10), 64u);  // none is longer than the group's chunk_bytes
  EXPECT_EQ(frames(16, 64 << 10), 256u);
  EXPECT_EQ(frames(1, 256 << 10, "none"), 8u);  // exact: 2 MiB of whole frames
  EXPECT_EQ(fullPayload(single(3 << 20, "sym4:bucket=1024"), DType::float32, 1 << 20), 65536u);
  EXPECT_EQ(fullPayload(single(5 << 20, "sym4:bucket=1024"), DType::float32, 1 << 20), (5u << 19) / 32 + 640);
}

TEST(Plan, HeaderNamesTheCodecOrTheLayout) {
  const MessagePlan one = planMessage(single(200000, "qsgd4:bucket=512"), DType::float16, kMinChunkBytes);
  ASSERT_EQ(one.frames.size(), 2u);
  FrameHeader want;
  want.codec = CodecId::qsgd;
  want.bits = 4;
  want.flags = 1;
  want.bucket = 512;
  want.dtype = DType::float16;
  want.elements = one.frames[0].elements;
  want.payload_bytes = one.frames[0].payload_bytes;
  EXPECT_EQ(one.header(one.frames[0]), want);
  want.first = one.frames[0].elements;
  want.elements = 200000 - want.first;
  want.payload_bytes = one.frames[1].payload_bytes;
  EXPECT_EQ(one.header(one.frames[1]), want);

  const Layout layout = mixedLayout(10, 3);
  const MessagePlan many = planMessage(layout, DType::float32, kMaxChunkBytes);
  FrameHeader mixed;
  mixed.codec = CodecId::layout;
  mixed.key_hash = layout.hash();
  mixed.dtype = DType::float32;
  mixed.elements = layout.elements();
  mixed.payload_bytes = many.frames[0].payload_bytes;
  EXPECT_EQ(many.header(many.frames[0]), mixed);
}

TEST(Plan, RefusesTypesACodecDoesNotTake) {
  for (DType dtype : test::kAllTypes) {
    if (std::find(test::kFloats.begin(), test::kFloats.end(), dtype) != test::kFloats.end()) continue;
    const auto plan = [&] { planMessage(single(10, "minmax8"), dtype, kMinChunkBytes); };
    EXPECT_TRUE(test::holds(test::thrownBy<TypeError>(plan), {dtypeName(dtype), "minmax8:bucket=1024"}));
  }
}

}  // namespace
}  // namespace lowcomm

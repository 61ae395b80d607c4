#include "collective/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "collective_cases.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using test::mixedLayout;
using test::single;

// The laws of a cut, whatever the layout: frames and runs cover the message once and in order, cuts fall at multiples
// of the codec's granularity, sizes are the codec's, a frame fits the group's buffers, and no frame is left half empty.
void expectLaws(const MessagePlan& plan, size_t chunk_bytes) {
  const size_t full = fullPayload(plan.layout, plan.dtype, chunk_bytes);
  ASSERT_LE(full, chunk_bytes);
  uint64_t at = 0;
  size_t done = 0;  // of a payload in parts
  for (size_t c = 0; c < plan.frames.size(); ++c) {
    const Frame& chunk = plan.frames[c];
    ASSERT_EQ(chunk.first, at);
    ASSERT_FALSE(chunk.runs.empty());
    size_t bytes = 0;
    for (const Run& run : chunk.runs) {
      const Segment& segment = plan.layout.segments()[run.segment];
      ASSERT_EQ(run.at, at);
      ASSERT_EQ(run.at, segment.first + run.offset);
      ASSERT_GT(run.count, 0u);
      ASSERT_LE(run.offset + run.count, segment.count);
      ASSERT_TRUE(run.codec->spec() == segment.codec);
      ASSERT_EQ(run.offset % run.codec->granularity(), 0u);
      if (run.offset + run.count < segment.count) ASSERT_EQ(run.count % run.codec->granularity(), 0u);
      ASSERT_EQ(run.whole, run.codec->encodedBytes(run.count, plan.dtype));
      if (run.codec->granularity() == Codec::kUncut) {  // bytes are cut, in order
        ASSERT_EQ(run.count, segment.count);
        ASSERT_EQ(run.part, done);
        ASSERT_GT(run.bytes, 0u);
        ASSERT_LE(run.part + run.bytes, run.whole);
        done = run.last() ? 0 : done + run.bytes;
      } else {
        ASSERT_EQ(run.bytes, run.whole);
      }
      if (run.last()) at += run.count;
      bytes += run.bytes;
    }
    ASSERT_EQ(chunk.elements, at - chunk.first);
    ASSERT_EQ(chunk.payload_bytes, bytes);
    ASSERT_LE(kFrameHeaderBytes + bytes, frameCapacity(chunk_bytes));
    if (chunk.runs.size() > 1) ASSERT_LE(bytes, full);
    if (c + 1 < plan.frames.size()) {
      const Run& next = plan.frames[c + 1].runs[0];
      if (next.codec->granularity() == Codec::kUncut) {
        ASSERT_LT(full - bytes, 64u);
        continue;
      }
      const uint64_t granule =
          std::min(next.codec->granularity(), plan.layout.segments()[next.segment].count - next.offset);
      ASSERT_GT(bytes + next.codec->encodedBytes(granule, plan.dtype), full);
    }
  }
  ASSERT_EQ(at, plan.layout.elements());
}

const size_t kChunkSizes[] = {kMinChunkBytes, 256 << 10, kMaxChunkBytes};

TEST(Plan, NoneCoversEveryType) {
  for (DType dtype : test::kAllTypes) {
    for (size_t chunk_bytes : kChunkSizes) {
      const uint64_t full = chunk_bytes / itemBytes(dtype);
      for (uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{511}, uint64_t{512}, uint64_t{513}, full - 1, full,
                         full + 1, 5 * full + 777}) {
        SCOPED_TRACE(std::string(dtypeName(dtype)) + " " + std::to_string(n));
        const MessagePlan plan = planMessage(single(n, "none"), dtype, chunk_bytes);
        expectLaws(plan, chunk_bytes);
        if (fullPayload(plan.layout, dtype, chunk_bytes) == chunk_bytes) {
          EXPECT_EQ(plan.frames.size(), (n + full - 1) / full);
        }
        EXPECT_EQ(plan.rawBytes(), n * itemBytes(dtype));
      }
    }
  }
}

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

TEST(Plan, GridCodecsAreCutAtBuckets) {
  for (int bits : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (uint64_t bucket : {64, 512, 1024, 65536}) {
      const std::string codec = "qsgd" + std::to_string(bits) + ":bucket=" + std::to_string(bucket);
      for (size_t chunk_bytes : kChunkSizes) {
        for (uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{511}, uint64_t{512}, uint64_t{513}, bucket - 1, bucket,
                           bucket + 1, 3 * bucket + 777, uint64_t{3000001}}) {
          SCOPED_TRACE(codec + " " + std::to_string(n) + " in frames of " + std::to_string(chunk_bytes));
          for (DType dtype : test::kFloats)
            expectLaws(planMessage(single(n, codec), dtype, chunk_bytes), chunk_bytes);
        }
      }
    }
  }
}

TEST(Plan, PayloadsThatCannotBeCutTravelInParts) {
  for (const char* codec : {"minmax8:bucket=tensor", "topk", "topk:keep=0.001", "sym4:axis=channel,C=256"}) {
    for (size_t chunk_bytes : kChunkSizes) {
      for (uint64_t n : {uint64_t{0}, uint64_t{256}, uint64_t{65536}, uint64_t{3000064}}) {
        SCOPED_TRACE(std::string(codec) + " " + std::to_string(n) + " in frames of " + std::to_string(chunk_bytes));
        const MessagePlan plan = planMessage(single(n, codec), DType::bfloat16, chunk_bytes);
        expectLaws(plan, chunk_bytes);
        const size_t whole = makeCodec(CodecSpec::parse(codec))->encodedBytes(n, DType::bfloat16);
        const size_t full = fullPayload(plan.layout, DType::bfloat16, chunk_bytes);
        ASSERT_EQ(plan.frames.size(), (whole + full - 1) / full);
        for (size_t c = 0; c + 1 < plan.frames.size(); ++c)
          EXPECT_EQ(plan.frames[c].elements, 0u);
        if (n > 0) {
          EXPECT_EQ(plan.frames.back().elements, n);
          EXPECT_EQ(plan.frames.back().first, 0u);
        }
      }
    }
  }
}

// A bucket of 65,536 elements at 8 bits with its metadata is more than the least chunk: still one frame a bucket.
TEST(Plan, LargestBucketFitsTheLeastChunk) {
  const MessagePlan plan = planMessage(single(3 * 65536 + 5, "minmax8:bucket=65536"), DType::float32, kMinChunkBytes);
  expectLaws(plan, kMinChunkBytes);
  ASSERT_EQ(plan.frames.size(), 4u);
  EXPECT_EQ(plan.frames[0].payload_bytes, 65536u + 64);
  EXPECT_EQ(kFrameHeaderBytes + plan.frames[0].payload_bytes, frameCapacity(kMinChunkBytes));
  EXPECT_EQ(plan.frames[3].elements, 5u);
}

TEST(Plan, LayoutsOfManySegments) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    const Layout layout = mixedLayout(1 + seed * 10, seed, seed % 3 ? 3000 : 200000);
    for (size_t chunk_bytes : kChunkSizes) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " in frames of " + std::to_string(chunk_bytes));
      for (DType dtype : test::kFloats)
        expectLaws(planMessage(layout, dtype, chunk_bytes), chunk_bytes);
    }
  }
}

// A rank plans from its own layout, a peer from the text they agreed on: the frames must be the same.
TEST(Plan, EqualOnAllRanks) {
  const Layout layout = mixedLayout(100, 7, 50000);
  const MessagePlan mine = planMessage(layout, DType::bfloat16, kMinChunkBytes);
  const MessagePlan theirs = planMessage(Layout::parse(layout.text()), DType::bfloat16, kMinChunkBytes);
  ASSERT_EQ(mine.frames.size(), theirs.frames.size());
  for (size_t c = 0; c < mine.frames.size(); ++c) {
    EXPECT_EQ(mine.header(mine.frames[c]), theirs.header(theirs.frames[c]));
    ASSERT_EQ(mine.frames[c].runs.size(), theirs.frames[c].runs.size());
    for (size_t r = 0; r < mine.frames[c].runs.size(); ++r) {
      const auto &a = mine.frames[c].runs[r], &b = theirs.frames[c].runs[r];
      EXPECT_EQ(std::tie(a.at, a.offset, a.count, a.bytes, a.segment),
                std::tie(b.at, b.offset, b.count, b.bytes, b.segment));
    }
  }
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

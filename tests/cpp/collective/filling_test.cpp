// FORMAT.md "Filling frames", written again from the document alone: sizes from its formulas, runs found by counting
// up. plan.cpp must send the frames that a stranger who follows the page expects.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <random>
#include <utility>

#include "collective/plan.h"
#include "collective_cases.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using test::single;

uint64_t roundedUp(uint64_t x, uint64_t unit) {
  return (x + unit - 1) / unit * unit;
}

uint64_t bytesOf(const Segment& segment, uint64_t itemsize, uint64_t n) {
  if (n == 0) return 0;
  switch (segment.codec.id) {
    case CodecId::none:
      return roundedUp(n * itemsize, 64);
    case CodecId::fp16:
    case CodecId::bf16:
      return roundedUp(n * 2, 64);
    case CodecId::logbyte:
      return roundedUp(n, 64);
    case CodecId::log9:
      return roundedUp(roundedUp(n * 9, 8) / 8, 64);
    case CodecId::topk: {
      if (segment.codec.bucket != 0) {
        const uint64_t spacing = segment.codec.bucket / static_cast<uint64_t>(segment.codec.keep);
        const uint64_t k = roundedUp(n, spacing) / spacing, lows = k * static_cast<uint64_t>(std::countr_zero(spacing));
        const uint64_t places = roundedUp(2 * k, 8) / 8 + roundedUp(lows, 8) / 8;
        CodecSpec values{segment.codec.values, segment.codec.value_bits, 128, Range::absmax, Meta::bf16};
        return roundedUp(places, 64) + bytesOf({0, k, values}, 4, k);
      }
      const auto rounded = static_cast<uint64_t>(segment.codec.keep * static_cast<double>(n) + 0.5);
      const uint64_t k = std::max<uint64_t>(1, rounded), blocks = roundedUp(n, 65536) / 65536;
      const uint64_t places = std::min(roundedUp(n, 8) / 8, 4 * blocks + 2 * k);
      CodecSpec values{segment.codec.values, segment.codec.value_bits, 1024};
      return roundedUp(16 + places, 64) + bytesOf({0, k, values}, 4, k);
    }
    default:
      break;
  }
  const uint64_t b = segment.codec.bits, bucket = segment.codec.bucket;
  const uint64_t buckets = segment.codec.axis == Axis::channel ? bucket
                           : bucket == 0                       ? 1
                                                               : roundedUp(n, bucket) / bucket;
  if (segment.codec.rotate || segment.codec.id == CodecId::gauss) n = roundedUp(n, 512);
  const uint64_t rows = roundedUp(n % 512, 16) / 16;
  const bool step_only =
      (segment.codec.id >= CodecId::sym && segment.codec.id <= CodecId::sign1) || segment.codec.id == CodecId::gauss;
  const uint64_t m = (step_only ? 4 : 8) / (segment.codec.meta == Meta::bf16 ? 2 : 1);
  return roundedUp(m * buckets, 64) + 64 * (b * (n / 512) + roundedUp(rows * b, 32) / 32);
}

bool isUncut(const CodecSpec& codec) {
  return codec.axis == Axis::channel || ((codec.id == CodecId::topk || isGrid(codec.id)) && codec.bucket == 0);
}

uint64_t granularityOf(const Segment& segment) {
  const auto keep = segment.codec.id == CodecId::topk ? static_cast<uint64_t>(segment.codec.keep) : 0;
  return std::max<uint64_t>(keep ? 512 * segment.codec.bucket / keep : 512, segment.codec.bucket);
}

uint64_t largest(const Segment& segment, uint64_t itemsize, uint64_t left, uint64_t room) {
  if (bytesOf(segment, itemsize, left) <= room) return left;
  const uint64_t g = granularityOf(segment);
  uint64_t n = 0;
  while (n + g < left && bytesOf(segment, itemsize, n + g) <= room)
    n += g;
  return n;
}

struct ExpectedFrame {
  uint64_t first = 0, elements = 0, bytes = 0;
  // Segment, first element in it, elements; bytes of the payload before this frame and in it.
  std::vector<std::array<uint64_t, 5>> runs;
};

std::vector<ExpectedFrame> filled(const Layout& layout, uint64_t itemsize, uint64_t chunk_bytes) {
  uint64_t t = 0;
  bool exact = true;
  for (const Segment& segment : layout.segments()) {
    t += bytesOf(segment, itemsize, segment.count);
    exact = exact && segment.codec.id == CodecId::none;
  }
  const uint64_t c = exact ? chunk_bytes : std::min<uint64_t>(chunk_bytes, std::max<uint64_t>(65536, t / 2048 * 64));
  const uint64_t m = std::max<uint64_t>(c, 65600);
  std::vector<ExpectedFrame> frames;
  ExpectedFrame open;
  const auto close = [&] {
    frames.push_back(open);
    open = {open.first + open.elements, 0, 0, {}};
  };
  for (size_t s = 0; s < layout.segments().size(); ++s) {
    const Segment& segment = layout.segments()[s];
    uint64_t left = segment.count;
    // Of a segment that cannot be cut, bytes are: its elements count where its last ones are.
    const uint64_t whole = isUncut(segment.codec) ? bytesOf(segment, itemsize, left) : 0;
    for (uint64_t bytes = whole; bytes > 0;) {
      const uint64_t part = open.bytes < c ? std::min(bytes, (c - open.bytes) / 64 * 64) : 0;
      if (part == 0) {
        close();
        continue;
      }
      open.runs.push_back({s, 0, segment.count, whole - bytes, part});
      open.bytes += part;
      bytes -= part;
      if (bytes == 0) open.elements += std::exchange(left, 0);
    }
    while (left > 0) {
      uint64_t n = 0;
      if (open.bytes < c) n = largest(segment, itemsize, left, c - open.bytes);
      if (n == 0 && open.bytes == 0) n = largest(segment, itemsize, left, m);
      if (n == 0) {
        close();
        continue;
      }
      open.runs.push_back({s, segment.count - left, n, 0, bytesOf(segment, itemsize, n)});
      open.elements += n;
      open.bytes += bytesOf(segment, itemsize, n);
      left -= n;
    }
  }
  if (!open.runs.empty()) close();
  return frames;
}

void expectSameFrames(const Layout& layout, DType dtype, size_t chunk_bytes) {
  SCOPED_TRACE(std::string(dtypeName(dtype)) + " in frames of " + std::to_string(chunk_bytes) + ": " +
               layout.text().substr(0, 300));
  const MessagePlan plan = planMessage(layout, dtype, chunk_bytes);
  const std::vector<ExpectedFrame> expected = filled(layout, itemBytes(dtype), chunk_bytes);
  ASSERT_EQ(plan.frames.size(), expected.size());
  ASSERT_EQ(plan.rawBytes(), layout.elements() * itemBytes(dtype));
  for (size_t i = 0; i < expected.size(); ++i) {
    const Frame& frame = plan.frames[i];
    ASSERT_EQ(frame.first, expected[i].first) << "frame " << i;
    ASSERT_EQ(frame.elements, expected[i].elements) << "frame " << i;
    ASSERT_EQ(frame.payload_bytes, expected[i].bytes) << "frame " << i;
    ASSERT_LE(kFrameHeaderBytes + frame.payload_bytes, frameCapacity(chunk_bytes)) << "frame " << i;
    ASSERT_EQ(frame.runs.size(), expected[i].runs.size()) << "frame " << i;
    for (size_t r = 0; r < frame.runs.size(); ++r) {
      const Run& run = frame.runs[r];
      const Segment& segment = layout.segments()[run.segment];
      const std::array<uint64_t, 5> found = {run.segment, run.offset, run.count, run.part, run.bytes};
      ASSERT_EQ(found, expected[i].runs[r]) << "frame " << i;
      ASSERT_EQ(run.at, segment.first + run.offset);
      ASSERT_TRUE(run.codec->spec() == segment.codec);
      ASSERT_EQ(run.whole, run.codec->encodedBytes(run.count, dtype));
    }
  }
}

// Least, most, the default, and some in between that no codec's sizes divide.
const size_t kChunkSizes[] = {65536, 65537, 65599, 65600, 65601, 100000, 262144, 1048575, 1048576};

TEST(Filling, OneSegment) {
  for (const char* codec : {"none",
                            "minmax1:bucket=64",
                            "minmax3:bucket=128",
                            "qsgd4",
                            "minmax5:bucket=16384",
                            "qsgd7:bucket=512",
                            "minmax8:bucket=64",
                            "qsgd8:bucket=65536",
                            "sym4:bucket=64",
                            "sign1",
                            "minmax4:bucket=64,meta=bf16",
                            "sym2:bucket=64,meta=bf16",
                            "fp16",
                            "bf16",
                            "logbyte",
                            "log9",
                            "topk:keep=0.01",
                            "topk:values=qsgd4",
                            "topk:chunk=256,keep=32",
                            "topk:chunk=1024,keep=8,values=minmax1",
                            "minmax8:bucket=tensor",
                            "sign1:bucket=tensor,meta=bf16",
                            "qsgd3:axis=channel,C=1",
                            "sym4:axis=channel,C=7",
                            "gauss3",
                            "mid4:bucket=512,rotate=1",
                            "gauss8:bucket=65536,meta=fp32"}) {
    for (size_t chunk_bytes : kChunkSizes) {
      const uint64_t bits = std::max<uint64_t>(1, CodecSpec::parse(codec).bits);
      const uint64_t full = chunk_bytes * 8 / (codec[0] == 'n' ? 32 : bits);
      std::vector<uint64_t> counts = {0,     1,     511,   512,    513,           1023,          1024,          1025,
                                      65535, 65536, 65537, 131073, 3 * full + 77, 33 * full - 1, 70 * full + 77};
      for (uint64_t near = full / 512 * 512 - 1536; near <= full + 1024; near += 512)
        counts.insert(counts.end(), {near - 1, near, near + 1});
      for (uint64_t n : counts)
        expectSameFrames(single(test::wholeRows(n, codec), codec), DType::float32, chunk_bytes);
    }
  }
}

TEST(Filling, ChunksAreATwoHundredthOfFloat32WithTheirHeaders) {
  const uint64_t n = uint64_t{1} << 24;
  uint64_t bytes = 0;
  for (const Frame& frame : planMessage(single(n, "topk:chunk=4096,keep=64,values=sym2"), DType::float32, 65536).frames)
    bytes += kFrameHeaderBytes + frame.payload_bytes;
  EXPECT_LT(201 * bytes, 4 * n);
}

TEST(Filling, EveryType) {
  for (DType dtype : test::kAllTypes) {
    for (uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{65536}, uint64_t{65537}, uint64_t{400000}})
      expectSameFrames(single(n, "none"), dtype, kMinChunkBytes);
  }
}

TEST(Filling, ManySegments) {
  std::mt19937 generator(1);
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const Layout layout = test::mixedLayout(1 + generator() % 60, seed, seed % 3 ? 4000 : 150000);
    for (size_t chunk_bytes : kChunkSizes)
      expectSameFrames(layout, test::kFloats[seed % 3], chunk_bytes);
    expectSameFrames(layout, test::kFloats[seed % 3], 65536 + generator() % 983040);
  }
}

}  // namespace
}  // namespace lowcomm

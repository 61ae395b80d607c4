// Collectives whose elements are on a device: what crosses. The order of its work is device_codec_queue_test.cpp's.
#include <gtest/gtest.h>

#include <vector>

#include "collective/collectives.h"
#include "collective_cases.h"
#include "staged_cases.h"

namespace lowcomm {
namespace {

using namespace test;

// The payloads of a message, which is all that it has to copy.
uint64_t codesOf(uint64_t n, const char* codec, size_t chunk_bytes) {
  uint64_t bytes = 0;
  for (const Frame& chunk : planMessage(test::single(n, codec), DType::float32, chunk_bytes).frames)
    bytes += chunk.payload_bytes;
  return bytes;
}

// Payloads cross once each way and nothing else does: what is sent to one peer or to all, what comes from every peer.
TEST(StagedOrder, OnlyCodesCross) {
  const uint64_t n = 4 * 57344;
  const char* codec = "sym4:bucket=1024";
  for (int size : {2, 4}) {
    const auto w = static_cast<uint64_t>(size);
    const uint64_t slice = codesOf(n / w, codec, kMinChunkBytes), part = codesOf(n, codec, kMinChunkBytes);
    Ranks ranks(size);
    std::vector<uint64_t> out(w), in(w);
    ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
      std::vector<float> x(n, 1.0f);
      const auto device_codec = lateDeviceCodec(op.group.chunk_bytes);
      allReduce(op, {{n, CodecSpec::parse(codec), DType::float32, x.data(), drawsOf(rank)}}, kSum, device_codec.get());
      out[rank] = device_codec->hostBytes();
      in[rank] = device_codec->deviceBytes();
    });
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(out[rank], w * slice);  // to every peer its slice, and the own one's sum
      EXPECT_EQ(in[rank], 2 * (w - 1) * slice);
    }
    ranks.expectRun("all_gather", [&](int rank, OpContext& op) {
      std::vector<float> x(n, 1.0f), y(n * w);
      const auto device_codec = lateDeviceCodec(op.group.chunk_bytes);
      allGather(op, {test::gatherOf(x, y, CodecSpec::parse(codec), device_codec.get())});
      out[rank] = device_codec->hostBytes();
      in[rank] = device_codec->deviceBytes();
    });
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(out[rank], part);
      EXPECT_EQ(in[rank], (w - 1) * part);
    }
  }
}

}  // namespace
}  // namespace lowcomm

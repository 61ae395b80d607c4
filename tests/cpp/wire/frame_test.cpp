#include "wire/frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "base/error.h"
#include "base/hashes.h"
#include "codec/codec.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;

FrameHeader exampleHeader() {
  FrameHeader h;
  h.codec = CodecId::qsgd;
  h.bits = 4;
  h.flags = 1;
  h.dtype = DType::float32;
  h.bucket = 64;
  h.elements = 1000;
  h.first = 4096;
  h.sequence = 17;
  h.epoch = 3;
  h.channel = 5;
  h.state_version = 2;
  h.key_hash = 0x123456789abcdef0;
  h.payload_bytes = static_cast<uint32_t>(makeCodec({h.codec, h.bits, h.bucket})->encodedBytes(1000, h.dtype));
  return h;
}

Bytes exampleFrame() {
  const FrameHeader h = exampleHeader();
  Bytes frame(kFrameHeaderBytes + h.payload_bytes);
  std::vector<float> x(1000);
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(i % 37);
  makeCodec({h.codec, h.bits, h.bucket})
      ->encode(std::span(frame).subspan(kFrameHeaderBytes), x.data(), h.dtype, 4096, 1000, {});
  sealFrame(frame, h);
  return frame;
}

// Frames of a peer that computes its CRC correctly but means something else.
void reseal(Bytes& frame) {
  uint32_t crc = crc32c(frame.data(), 60);
  crc = crc32c(frame.data() + 64, frame.size() - 64, crc);
  std::memcpy(frame.data() + 60, &crc, 4);
}

template <class F>
std::string refusal(F&& call) {
  return test::thrownBy<WireError>(call);
}

void expectNamed(const std::string& what, const std::string& field) {
  EXPECT_EQ(what.find("frame: " + field + ": expected "), 0u) << field << " in: " << what;
  EXPECT_NE(what.find(", got "), std::string::npos) << what;
}

TEST(Frame, RoundTrip) {
  const Bytes frame = exampleFrame();
  const FrameHeader got = openFrame(frame);
  EXPECT_EQ(got, exampleHeader());
  EXPECT_EQ(framePayload(frame, got).size(), got.payload_bytes);
  EXPECT_EQ(framePayload(frame, got).data(), frame.data() + kFrameHeaderBytes);
  Bytes longer = frame;  // a receive buffer may be larger than the frame
  longer.resize(frame.size() + 100, std::byte{0xaa});
  EXPECT_EQ(openFrame(longer), exampleHeader());
  EXPECT_EQ(framePayload(longer, got).size(), got.payload_bytes);

  Bytes empty(kFrameHeaderBytes);
  sealFrame(empty, {});
  EXPECT_EQ(openFrame(empty), FrameHeader{});
}

TEST(Frame, SealRefusesOurOwnMistakes) {
  Bytes frame = exampleFrame();
  FrameHeader h = exampleHeader();
  EXPECT_THROW(sealFrame(std::span(frame).first(100), h), ValueError);
  h.flags = 0;
  EXPECT_THROW(sealFrame(frame, h), ValueError);
  h = exampleHeader();
  h.bits = 9;
  EXPECT_THROW(sealFrame(frame, h), ValueError);
  h = exampleHeader();
  h.dtype = static_cast<DType>(11);
  EXPECT_THROW(sealFrame(frame, h), ValueError);
}

TEST(Frame, EveryCorruptedByteIsANamedError) {
  const Bytes good = exampleFrame();
  for (size_t at = 0; at < good.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      Bytes frame = good;
      frame[at] ^= std::byte(1 << bit);
      const std::string what = refusal([&] { openFrame(frame); });
      if (at < 4) {
        expectNamed(what, "magic");
      } else if (at == 4) {
        expectNamed(what, "version");
      } else if (at >= 56 && at < 60) {
        EXPECT_TRUE(what.find("payload_bytes") != std::string::npos || what.find("crc32c") != std::string::npos)
            << what;
      } else {
        expectNamed(what, "crc32c");
      }
    }
  }
}

TEST(Frame, NumbersThatAreNoneAreNamed) {
  const struct {
    size_t at;
    int value;
    const char* field;
  } cases[] = {{4, 1, "version"},  {5, 4, "kind"},     {5, 255, "kind"},  {6, 100, "codec"},   {6, 254, "codec"},
               {7, 0, "bits"},     {7, 9, "bits"},     {8, 0, "flags"},   {8, 2, "flags"},     {8, 9, "flags"},
               {8, 0x81, "flags"}, {9, 11, "dtype"},   {9, 255, "dtype"}, {10, 1, "reserved"}, {11, 1, "reserved"},
               {12, 65, "bucket"}, {12, 32, "bucket"}, {15, 1, "bucket"}, {6, 0, "bits"},      {6, 255, "bits"},
               {6, 1, "flags"},    {6, 4, "flags"},    {6, 3, "codec"},   {6, 8, "codec"},     {6, 13, "codec"}};
  for (const auto& c : cases) {
    Bytes frame = exampleFrame();
    frame[c.at] = static_cast<std::byte>(c.value);
    reseal(frame);
    expectNamed(refusal([&] { openFrame(frame); }), c.field);
  }
}

TEST(Frame, FlagsAreThoseOfTheCodec) {
  const struct {
    const char* codec;
    std::vector<uint8_t> flags;
  } cases[] = {{"minmax4", {0, 4, 16, 20, 32, 36}},
               {"qsgd4:rotate=1", {1, 5, 17, 21, 33, 37}},
               {"lattice4", {2, 18, 34}},
               {"sym4", {0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44}},
               {"mid4:range=l2,meta=bf16", {0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44}},
               {"sign1:axis=channel,C=1000", {0, 4, 16, 20, 32, 36}},
               {"levels4", {0, 4}},
               {"gauss4", {32, 36}},
               {"fp16", {0}},
               {"bf16", {0}},
               {"topk", {0}},
               {"topk:chunk=64,keep=8", {0}},
               {"logbyte", {0}},
               {"log9", {0}}};
  for (const auto& c : cases) {
    const CodecSpec spec = CodecSpec::parse(c.codec);
    EXPECT_NE(std::find(c.flags.begin(), c.flags.end(), frameFlags(spec)), c.flags.end());
    FrameHeader h;
    h.codec = spec.id;
    h.bits = spec.bits;
    h.bucket = spec.bucket;
    h.dtype = DType::float32;
    std::vector<std::byte> frame(kFrameHeaderBytes);
    for (int flags = 0; flags < 256; ++flags) {
      frame.assign(kFrameHeaderBytes, std::byte{0});
      h.flags = frameFlags(spec);
      sealFrame(frame, h);
      frame[8] = static_cast<std::byte>(flags);
      reseal(frame);
      const std::string what = refusal([&] { openFrame(frame); });
      // A codec by bucket may have units, too.
      const bool units = (flags & kUnitFlag) && isGrid(spec.id) && !needsTable(spec) && !(flags & kChannelFlag);
      const int other = units ? flags & ~kUnitFlag : flags;
      const bool allowed = std::find(c.flags.begin(), c.flags.end(), other) != c.flags.end();
      if (allowed && spec.axis == Axis::channel && !(flags & kChannelFlag)) {
        expectNamed(what, "bucket");  // 1000 is one of channels only
        continue;
      }
      EXPECT_EQ(what == test::kNothing, allowed) << c.codec << " " << flags << " " << what;
      if (!allowed) expectNamed(what, "flags");
    }
  }
}

TEST(Frame, EveryFieldIsComparedWithTheOps) {
  const struct {
    const char* field;
    std::function<void(FrameHeader&)> change;
  } cases[] = {
      {"version", [](FrameHeader& h) { h.version = 9; }},
      {"kind", [](FrameHeader& h) { h.kind = FrameKind::error; }},
      {"codec", [](FrameHeader& h) { h.codec = CodecId::minmax; }},
      {"bits", [](FrameHeader& h) { h.bits = 5; }},
      {"flags", [](FrameHeader& h) { h.flags = 0; }},
      {"dtype", [](FrameHeader& h) { h.dtype = DType::float16; }},
      {"bucket", [](FrameHeader& h) { h.bucket = 128; }},
      {"elements", [](FrameHeader& h) { h.elements = 999; }},
      {"first", [](FrameHeader& h) { h.first = uint64_t{1} << 40; }},
      {"sequence", [](FrameHeader& h) { h.sequence = 18; }},
      {"epoch", [](FrameHeader& h) { h.epoch = 2; }},
      {"channel", [](FrameHeader& h) { h.channel = 0; }},
      {"state_version", [](FrameHeader& h) { h.state_version = 3; }},
      {"key_hash", [](FrameHeader& h) { h.key_hash = 1; }},
      {"payload_bytes", [](FrameHeader& h) { h.payload_bytes = 1; }},
  };
  EXPECT_NO_THROW(expectFrame(exampleHeader(), exampleHeader()));
  for (const auto& c : cases) {
    FrameHeader got = exampleHeader();
    c.change(got);
    expectNamed(refusal([&] { expectFrame(got, exampleHeader()); }), c.field);
  }
}

TEST(Frame, TruncatedAnywhere) {
  const Bytes good = exampleFrame();
  for (size_t size = 0; size < good.size(); ++size) {
    // Exactly this many bytes on the heap: a read past them is the sanitizer's to see.
    const Bytes frame(good.begin(), good.begin() + static_cast<long>(size));
    EXPECT_NE(refusal([&] { openFrame(frame); }), test::kNothing) << size;
  }
}

}  // namespace
}  // namespace lowcomm

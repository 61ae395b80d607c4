// The examples of the wire format's pages, read from the pages themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "codec/codec.h"
#include "collective/message_summary.h"
#include "collective/plan.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

std::istringstream documents() {
  std::ostringstream text;
  for (const char* name : {"CODECS", "FRAMES", "CONVERSATION"})
    text << std::ifstream(std::string(LOWCOMM_SOURCE_DIR "/csrc/wire/FORMAT_") + name + ".md").rdbuf();
  return std::istringstream(text.str());
}

// The text of the one fenced block with this info string.
std::string fenced(const std::string& info) {
  std::istringstream file = documents();
  std::string line, out;
  bool inside = false;
  while (std::getline(file, line)) {
    if (line == "```" + info) {
      inside = true;
    } else if (line == "```") {
      inside = false;
    } else if (inside) {
      out += line + "\n";
    }
  }
  return out;
}

// Rows of the one table whose first columns have these titles, as numbers.
std::vector<std::vector<uint64_t>> table(const std::string& titles, size_t columns) {
  std::istringstream file = documents();
  std::vector<std::vector<uint64_t>> rows;
  std::string line;
  while (std::getline(file, line) && !line.starts_with(titles)) {
  }
  std::getline(file, line);  // the rule under the titles
  while (std::getline(file, line) && line.starts_with("|")) {
    std::replace(line.begin(), line.end(), '|', ' ');
    std::istringstream numbers(line);
    rows.emplace_back(columns);
    for (uint64_t& number : rows.back())
      numbers >> number;
  }
  return rows;
}

TEST(Format, TheExampleOfFilledFrames) {
  const MessagePlan plan = planMessage(Layout::parse(fenced("layout")), DType::float32, 65536);
  std::vector<std::vector<uint64_t>> frames;
  for (const Frame& chunk : plan.frames)
    frames.push_back({chunk.first, chunk.elements, chunk.payload_bytes});
  EXPECT_EQ(table("| first | elements | payload_bytes |", 3), frames);
}

TEST(Format, TheExampleOfADescription) {
  const auto plan = [](uint64_t n) { return planMessage(Layout::single(n, {}), DType::float32, kMinChunkBytes); };
  EXPECT_EQ(describe("all_gather", {plan(10), plan(20)}).text(), fenced("description"));
}

// A line is `codec | elements | bytes | offset:digits ...`; what is not listed is 0.
TEST(Format, TheExamplesOfPayloads) {
  std::istringstream lines(fenced("payloads"));
  int examples = 0;
  for (std::string line; std::getline(lines, line); ++examples) {
    std::istringstream fields(line);
    std::string codec_text, values, size, listed;
    std::getline(fields, codec_text, '|');
    std::getline(fields, values, '|');
    std::getline(fields, size, '|');
    std::getline(fields, listed);
    codec_text.pop_back();
    std::vector<float> x;
    std::istringstream numbers(values);
    for (float v; numbers >> v;)
      x.push_back(v);
    std::vector<std::byte> expected(std::stoul(size));
    std::istringstream groups(listed);
    for (std::string group; groups >> group;) {
      size_t at = std::stoul(group);
      for (size_t i = group.find(':') + 1; i < group.size(); i += 2)
        expected[at++] = static_cast<std::byte>(std::stoul(group.substr(i, 2), nullptr, 16));
    }
    const auto codec = makeCodec(CodecSpec::parse(codec_text));
    std::vector<std::byte> payload(codec->encodedBytes(x.size(), DType::float32));
    codec->encode(payload, x.data(), DType::float32, 0, x.size(), {});
    EXPECT_EQ(payload, expected) << line;
  }
  EXPECT_EQ(examples, 8);
}

TEST(Format, TheExampleOfGauss) {
  const auto codec = makeCodec(CodecSpec::parse("gauss2:meta=fp32"));
  const float x = 8;
  std::vector<std::byte> payload(192, std::byte{1}), expected(192);
  expected[0] = std::byte{0xf3};
  expected[1] = std::byte{0x04};
  expected[2] = std::byte{0xb5};
  expected[3] = std::byte{0x3f};
  ASSERT_EQ(codec->encodedBytes(1, DType::float32), payload.size());
  codec->encode(payload, &x, DType::float32, 0, 1, {});
  EXPECT_EQ(payload, expected);
  float y = 0;
  codec->decode(&y, DType::float32, payload, 0, 1);
  EXPECT_EQ(y, 12.0833406f);
}

TEST(Format, TheExampleOfAFrame) {
  std::vector<float> x;
  std::istringstream values(fenced("values"));
  for (float v; values >> v;)
    x.push_back(v);
  std::vector<std::byte> frame;
  std::istringstream hex(fenced("frame"));
  for (unsigned v; hex >> std::hex >> v;)
    frame.push_back(static_cast<std::byte>(v));
  ASSERT_EQ(x.size(), 18u);
  ASSERT_EQ(frame.size(), 192u);

  // Reading it ...
  const FrameHeader header = openFrame(frame);
  EXPECT_EQ(header.sequence, 7u);
  EXPECT_EQ(header.epoch, 1u);
  const auto codec = makeCodec(CodecSpec::parse("minmax2:bucket=64"));
  std::vector<float> y(18), expected = x;
  expected[17] = 1;
  codec->decode(y.data(), header.dtype, framePayload(frame, header), header.first, header.elements);
  EXPECT_EQ(y, expected);

  // ... and writing it.
  FrameHeader mine;
  mine.codec = CodecId::minmax;
  mine.bits = 2;
  mine.bucket = 64;
  mine.dtype = DType::float32;
  mine.elements = 18;
  mine.sequence = 7;
  mine.epoch = 1;
  mine.payload_bytes = static_cast<uint32_t>(codec->encodedBytes(18, DType::float32));
  std::vector<std::byte> written(64 + mine.payload_bytes);
  codec->encode(std::span(written).subspan(64), x.data(), DType::float32, 0, 18, {});
  sealFrame(written, mine);
  EXPECT_EQ(written, frame);
}

}  // namespace
}  // namespace lowcomm

// Payload and value hashes on which two independent implementations of the specification agree.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "grid_cases.h"
#include "sha256.h"

namespace lowcomm {
namespace {

// f in [-1, 1), exact in fp32, from the upper 24 bits of a 64-bit linear congruential generator.
std::vector<float> uniform(size_t count, uint64_t seed) {
  std::vector<float> x(count);
  for (float& v : x) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    v = static_cast<float>(seed >> 40) / 16777216.0f * 2 - 1;
  }
  return x;
}

std::vector<float> input(const std::string& name) {
  std::vector<float> x;
  if (name == "x0") return uniform(1024, 1);
  if (name == "x1") {
    x = uniform(1537, 2);
    for (float& v : x)
      v = v * v * v;
  } else if (name == "x2") {
    x = uniform(2050, 3);
    for (float& v : x)
      v = v + 1000;
  } else if (name == "x3") {
    x = uniform(513, 4);
    for (float& v : x)
      v = v * 1e-30f;
  } else if (name == "x4") {
    x.assign(700, 3.25f);
  } else if (name == "x5") {
    x = uniform(1000, 5);
    for (size_t i = 0; i < x.size(); ++i) {
      if (i % 7 == 0) x[i] = -0.0f;
      if (i % 11 == 0) x[i] = 0.0f;
    }
  } else if (name == "x6") {
    x = uniform(17, 6);
  }
  return x;
}

std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (std::byte b : bytes) {
    out += "0123456789abcdef"[std::to_integer<int>(b) >> 4];
    out += "0123456789abcdef"[std::to_integer<int>(b) & 15];
  }
  return out;
}

TEST(Golden, Sha256KnownAnswer) {
  EXPECT_EQ(test::sha256(std::as_bytes(std::span("abc", 3))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Golden, PayloadsAndValues) {
  const Draws draws{0x0123456789abcdef, 3u << 16 | 5, 7};
  for (const KernelTable* form : test::allForms()) {
    std::ifstream file(LOWCOMM_SOURCE_DIR "/tests/golden/codecs.txt");
    std::string line;
    int lines = 0;
    while (std::getline(file, line)) {
      std::istringstream fields(line);
      std::string codec_text, name, payload_hash, value_hash, payload_hex, value_hex;
      size_t bytes = 0;
      fields >> codec_text >> name >> bytes >> payload_hash >> value_hash >> payload_hex >> value_hex;
      SCOPED_TRACE(std::string(form->name) + ": " + codec_text + " " + name);
      const auto owner = makeCodec(CodecSpec::parse(codec_text), *form);
      const Codec& codec = *owner;
      const std::vector<float> x = input(name);
      const test::Bytes payload = test::encoded(codec, x, draws);
      const std::vector<float> y = test::decoded(codec, payload, x.size());
      EXPECT_EQ(payload.size(), bytes);
      EXPECT_EQ(test::sha256(payload), payload_hash);
      EXPECT_EQ(test::sha256(std::as_bytes(std::span(y))), value_hash);
      if (!payload_hex.empty()) {
        EXPECT_EQ(hex(payload), payload_hex);
        EXPECT_EQ(hex(std::as_bytes(std::span(y))), value_hex);
      }
      ++lines;
    }
    EXPECT_EQ(lines, 330);
  }
}

}  // namespace
}  // namespace lowcomm

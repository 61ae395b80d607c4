// Examples of the wire format's pages, read from the pages themselves; tests/python/wire/test_format_page.py has the
// others.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "collective/message_summary.h"
#include "collective/plan.h"

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

}  // namespace
}  // namespace lowcomm

#include "wire/layout.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/hashes.h"

namespace lowcomm {

namespace {

std::string line(const Segment& segment) {
  return std::to_string(segment.first) + " " + std::to_string(segment.count) + " " + segment.codec.str() +
         (segment.table ? " " + segment.table->str() : "");
}

uint64_t parseNumber(std::string_view line, std::string_view& rest) {
  const size_t space = rest.find(' ');
  uint64_t value = 0;
  const std::string_view digits = rest.substr(0, space);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (space == std::string_view::npos || digits.empty() || error != std::errc() ||
      end != digits.data() + digits.size()) {
    throw ValueError("layout: line: expected 'first count codec', got '" + std::string(line) + "'");
  }
  rest.remove_prefix(space + 1);
  return value;
}

}  // namespace

std::shared_ptr<const Codec> makeCodec(const Segment& segment) {
  std::shared_ptr<const Codec> codec = makeCodec(segment.codec);
  return segment.table ? codec->with(*segment.table) : codec;
}

Layout::Layout(std::vector<Segment> segments) {
  for (const Segment& segment : segments) {
    if (segment.codec.id == CodecId::layout) {
      throw ValueError("layout: segment '" + line(segment) + "': expected a codec of elements");
    }
    if (segment.codec.open()) {
      throw ValueError(
          "layout: segment '" + line(segment) +
          "': expected a codec whose number of channels is in its text (C=...), got none: a segment has no "
          "last dimension");
    }
    if (segment.codec.axis == Axis::channel && segment.count % segment.codec.bucket != 0) {
      throw ValueError("layout: segment '" + line(segment) + "': expected a multiple of " +
                       std::to_string(segment.codec.bucket) + " elements, got " + std::to_string(segment.count));
    }
    if (segment.table) {
      const std::string bits = needsTable(segment.codec) ? std::to_string(1 << segment.codec.bits) + " values" : "none";
      if (bits != std::to_string(segment.table->values().size()) + " values") {
        throw ValueError("layout: segment '" + line(segment) + "': level table: expected " + bits + ", got " +
                         std::to_string(segment.table->values().size()) + " values");
      }
    }
    if (segment.first != elements_) {
      throw ValueError("layout: segment '" + line(segment) + "': expected to start at element " +
                       std::to_string(elements_) + (segment.first < elements_ ? " (overlap)" : " (gap)"));
    }
    if (segment.count > UINT64_MAX - elements_) {
      throw ValueError("layout: segment '" + line(segment) + "': expected fewer than 2^64 elements in all");
    }
    elements_ += segment.count;
    if (segment.count == 0) continue;
    if (segment.codec.id == CodecId::none && !segments_.empty() && segments_.back().codec == segment.codec) {
      segments_.back().count += segment.count;
    } else {
      segments_.push_back(segment);
    }
  }
  hash_ = fnv1a(text());
}

Layout Layout::single(uint64_t elements, const CodecSpec& codec) {
  return Layout({{0, elements, codec}});
}

bool Layout::coded() const {
  return std::any_of(segments_.begin(), segments_.end(), [](const Segment& s) { return s.codec.id != CodecId::none; });
}

uint32_t Layout::stateVersion() const {
  uint32_t version = 0;
  for (const Segment& segment : segments_)
    version = std::max(version, segment.table ? segment.table->version() : 0);
  return version;
}

std::string Layout::text() const {
  std::string out;
  for (const Segment& segment : segments_)
    out += line(segment) + "\n";
  return out;
}

Layout Layout::parse(std::string_view text) {
  std::vector<Segment> segments;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) {
      throw ValueError("layout: expected a line end, got '" + std::string(text) + "'");
    }
    const std::string_view whole = text.substr(0, end);
    std::string_view rest = whole;
    Segment segment;
    segment.first = parseNumber(whole, rest);
    segment.count = parseNumber(whole, rest);
    const size_t space = rest.find(' ');
    segment.codec = CodecSpec::parse(rest.substr(0, space));
    if (space != std::string_view::npos) segment.table = LevelTable::parse(rest.substr(space + 1));
    segments.push_back(segment);
    text.remove_prefix(end + 1);
  }
  return Layout(std::move(segments));
}

}  // namespace lowcomm

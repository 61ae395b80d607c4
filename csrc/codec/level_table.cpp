#include "codec/level_table.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace lowcomm {
namespace {

// Compared by their bits, which are in the order of the values from 0 up: a caller that flushes subnormal numbers has
// the same tables as one that does not.
int32_t order(float x) {
  return std::bit_cast<int32_t>(x);
}

std::string text(float x) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof(digits), x).ptr};
}

template <typename T>
T number(std::string_view digits, std::string_view whole) {
  T value{};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    throw ValueError("level table: expected '<version>:<value>,<value>,...', got '" + std::string(whole) + "'");
  }
  return value;
}

}  // namespace

LevelTable::LevelTable(std::vector<float> values, uint32_t version) : values_(std::move(values)), version_(version) {
  const size_t count = values_.size();
  if (count < 2 || count > 256 || !std::has_single_bit(count)) {
    throw ValueError("level table: expected 2, 4, 8, ... or 256 values, got " + std::to_string(count));
  }
  if ((order(values_.front()) & 0x7fffffff) == 0) values_.front() = 0;    // +0, also for -0
  if (order(values_.front()) < 0 || order(values_.front()) > order(1)) {  // NaN is above 1
    throw ValueError("level table: value 0: expected one in 0...1, got " + text(values_.front()));
  }
  for (size_t i = 1; i < count; ++i) {
    if (order(values_[i]) > order(values_[i - 1]) && order(values_[i]) <= order(1)) continue;
    throw ValueError("level table: value " + std::to_string(i) + ": expected one above " + text(values_[i - 1]) +
                     " and at most 1, got " + text(values_[i]));
  }
}

LevelTable LevelTable::even(int bits) {
  const int last = (1 << bits) - 1;
  std::vector<float> values;
  for (int i = 0; i <= last; ++i)
    values.push_back(static_cast<float>(i) / static_cast<float>(last));
  return LevelTable(std::move(values));
}

std::string LevelTable::str() const {
  std::string out = std::to_string(version_);
  for (size_t i = 0; i < values_.size(); ++i)
    out += (i == 0 ? ":" : ",") + text(values_[i]);
  return out;
}

LevelTable LevelTable::parse(std::string_view whole) {
  const size_t colon = std::min(whole.find(':'), whole.size());
  const auto version = number<uint32_t>(whole.substr(0, colon), whole);
  std::vector<float> values;
  for (size_t at = colon; at < whole.size();) {
    const size_t end = std::min(whole.find(',', at + 1), whole.size());
    values.push_back(number<float>(whole.substr(at + 1, end - at - 1), whole));
    at = end;
  }
  return LevelTable(std::move(values), version);
}

int LevelTable::bits() const {
  return std::countr_zero(values_.size());
}

}  // namespace lowcomm

#include "codec/level_table.h"

#include <bit>
#include <charconv>
#include <cstdint>
#include <string>
#include <utility>

#include "codec/error.h"

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

}  // namespace

LevelTable::LevelTable(std::vector<float> values, uint32_t version) : values_(std::move(values)), version_(version) {
  const size_t count = values_.size();
  if (count < 2 || count > 256 || !std::has_single_bit(count)) {
    throw ValueError("level table: expected 2, 4, 8, ... or 256 values, got " + std::to_string(count));
  }
  if ((order(values_.front()) & 0x7fffffff) != 0 || order(values_.back()) != order(1)) {
    throw ValueError("level table: expected 0 as its first and 1 as its last value, got " + text(values_.front()) +
                     " and " + text(values_.back()));
  }
  values_.front() = 0;  // +0, also for -0
  for (size_t i = 1; i < count; ++i) {
    if (order(values_[i]) > order(values_[i - 1]) && order(values_[i]) <= order(1)) continue;  // NaN is above 1
    throw ValueError("level table: value " + std::to_string(i) + ": expected one above " + text(values_[i - 1]) +
                     ", got " + text(values_[i]));
  }
}

int LevelTable::bits() const {
  return std::countr_zero(values_.size());
}

}  // namespace lowcomm

#include "codec/level_table.h"

#include <bit>
#include <string>
#include <utility>

#include "codec/error.h"

namespace lowcomm {

LevelTable::LevelTable(std::vector<float> values, uint32_t version) : values_(std::move(values)), version_(version) {
  const size_t count = values_.size();
  if (count < 2 || count > 256 || !std::has_single_bit(count)) {
    throw ValueError("level table: expected 2, 4, 8, ... or 256 values, got " + std::to_string(count));
  }
  if (values_.front() != 0 || values_.back() != 1) {
    throw ValueError("level table: expected 0 as its first and 1 as its last value, got " +
                     std::to_string(values_.front()) + " and " + std::to_string(values_.back()));
  }
  values_.front() = 0;  // +0, also for -0
  for (size_t i = 1; i < count; ++i) {
    if (values_[i] > values_[i - 1]) continue;
    throw ValueError("level table: value " + std::to_string(i) + ": expected one above " +
                     std::to_string(values_[i - 1]) + ", got " + std::to_string(values_[i]));
  }
}

int LevelTable::bits() const {
  return std::countr_zero(values_.size());
}

}  // namespace lowcomm

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lowcomm {

// The 2^b values that a `levels<b>` codec rounds to, as fractions of a bucket's range from its minimum on (QSDP's
// learned levels, codec/level_learning.h). It travels apart from the payloads; `version` says which one a frame was
// encoded with.
class LevelTable {
 public:
  // Throws ValueError naming what is wrong: not 2, 4, ... or 256 values, one outside 0...1, one that is not above the
  // one before it. The ends need not be 0 and 1: a level that serves a bucket's extreme and nothing else is wasted.
  explicit LevelTable(std::vector<float> values, uint32_t version = 0);

  // i / (2^bits - 1), version 0: what learning starts from.
  static LevelTable even(int bits);

  // "<version>:<value>,<value>,...", each value as its shortest decimal: parse(str()) == *this. Throws ValueError.
  std::string str() const;
  static LevelTable parse(std::string_view text);

  std::span<const float> values() const { return values_; }
  int bits() const;
  uint32_t version() const { return version_; }

  bool operator==(const LevelTable&) const = default;

 private:
  std::vector<float> values_;
  uint32_t version_;
};

}  // namespace lowcomm

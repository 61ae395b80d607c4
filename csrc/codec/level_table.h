#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lowcomm {

// The 2^b values that a `levels<b>` codec rounds to, as fractions of a bucket's range from its minimum on (QSDP's
// learned levels). It travels apart from the payloads; `version` says which one a frame was encoded with.
class LevelTable {
 public:
  // Throws ValueError naming what is wrong: not 2, 4, ... or 256 values, a first one other than 0 or a last one other
  // than 1, one that is not above the one before it.
  explicit LevelTable(std::vector<float> values, uint32_t version = 0);

  std::span<const float> values() const { return values_; }
  int bits() const;
  uint32_t version() const { return version_; }

 private:
  std::vector<float> values_;
  uint32_t version_;
};

}  // namespace lowcomm

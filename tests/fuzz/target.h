#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/level_table.h"

// The function that a file of tests/fuzz/ tests: it takes any bytes, and ends the process if the library does anything
// but accept them or throw one of its own errors. libFuzzer calls it with bytes it makes up (`make fuzz`), replay.cpp
// with those of the corpus (`make test`).
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace lowcomm::fuzz {

// Ends the process unless `held`: a property that must hold for whatever was accepted.
inline void require(bool held) {
  if (!held) __builtin_trap();
}

// Levels are the caller's, not the payload's: any will do.
inline LevelTable evenTable(int bits) {
  std::vector<float> values(size_t{1} << bits);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i) / static_cast<float>(values.size() - 1);
  return LevelTable(values);
}

}  // namespace lowcomm::fuzz

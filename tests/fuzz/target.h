#pragma once

#include <cstddef>
#include <cstdint>

// What a file of tests/fuzz/ tests: takes any bytes, and ends the process if the library does anything but accept them
// or throw one of its own errors. libFuzzer calls it with bytes it makes up (`make fuzz`), replay.cpp with those of the
// corpus (`make test`).
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace lowcomm::fuzz {

// Ends the process unless `held`: a property that must hold for whatever was accepted.
inline void require(bool held) {
  if (!held) __builtin_trap();
}

}  // namespace lowcomm::fuzz

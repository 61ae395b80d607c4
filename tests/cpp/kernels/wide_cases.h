#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "grid_cases.h"

namespace lowcomm::test {

// The codec on `wide`, a table of loops at 16 lanes (sixteen_lanes.inl), gives the bytes and the values of scalar.
inline void expectScalars(const std::string& text, const KernelTable& wide, const std::vector<size_t>& sizes) {
  const auto scalar = codecWithTable(text, *scalarKernels()), codec = codecWithTable(text, wide);
  const bool whole = codec->granularity() == Codec::kUncut;
  for (size_t n : sizes) {
    const std::vector<float> x = normal(n, static_cast<uint32_t>(n), 3, 0.5f);
    for (uint64_t first : {uint64_t{0}, uint64_t{1} << 36}) {  // from where counter word 1 is not 0, too
      if (whole && first != 0) continue;
      const Draws draws{0x123456789abcdef, 7, 9};
      const Bytes payload = encoded(*codec, x, draws, first);
      expectAsReference(*codec, *scalar, x, payload, decoded(*codec, payload, n, first), draws, first);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

inline const std::vector<size_t> kWideSizes = {0, 1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 5000};

}  // namespace lowcomm::test

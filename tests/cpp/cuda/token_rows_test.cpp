// Rows of tokens on a device against those of the host, bit for bit; simulated and on a device.
#include "cuda/token_rows.h"

#include <gtest/gtest.h>

#include <vector>

#include "cuda/on_device.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::OnDevice;

TEST(CudaTokenRows, EqualTheHosts) {
  if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  const std::vector<int64_t> ids{0, 1, 77, 77, static_cast<int64_t>(kMostTokens) - 1, 40000};
  for (size_t width : {1u, 15u, 16u, 63u, 64u, 65u, 256u, 300u, 2047u, 2048u, 2049u, 5000u}) {
    const std::vector<float> x = test::normal(ids.size() * width, 4);
    for (bool normal : {false, true}) {
      for (bool with_x : {false, true}) {
        for (float factor : {1.0f, -1.0f}) {
          const TokenSigns tokens{11, 0.3f, width};
          std::vector<float> expected(x.size());
          for (size_t row = 0; row < ids.size(); ++row) {
            (normal ? addTokenNormals : addTokenSigns)(expected.data() + row * width,
                                                       with_x ? x.data() + row * width : nullptr,
                                                       static_cast<uint64_t>(ids[row]), tokens, factor);
          }
          OnDevice<float> source{std::span<const float>(x)}, out{std::span<const float>(x)};
          OnDevice<int64_t> there{std::span<const int64_t>(ids)};
          cuda::addTokenRows({}, out.data(), with_x ? source.data() : nullptr, there.data(), ids.size(), tokens, normal,
                             factor);
          ASSERT_EQ(out.host(), expected) << width << (normal ? " normal" : " signs") << (with_x ? " added" : "");
        }
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm

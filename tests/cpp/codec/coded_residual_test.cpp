// A residual in codes: its parts are those of the whole, however it is cut.
#include "codec/coded_residual.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::encoded;
using test::normal;

const std::shared_ptr<const Codec> kCodec = makeCodec(CodecSpec::parse(CodedResidual::kEightBits));

TEST(CodedResidual, PartsAreThoseOfTheWhole) {
  for (const uint64_t n : {1, 511, 512, 513, 1024, 2048, 5000, 20000, 70001}) {
    const std::vector<float> before = normal(n, 1), after = normal(n, 2);
    const Bytes kept = encoded(*kCodec, before);
    const std::vector<float> decoded = test::decoded(*kCodec, kept, n);
    for (const uint64_t step : {uint64_t{512}, uint64_t{1536}, uint64_t{8192}, (n + 511) / 512 * 512}) {
      Bytes next(kept.size(), std::byte{0xee});
      const CodedResidual residual(*kCodec, n, kept, next);
      std::vector<float> read(n, -1);
      std::vector<uint64_t> firsts;
      for (uint64_t first = 0; first < n; first += step)
        firsts.push_back(first);
      std::reverse(firsts.begin(), firsts.end());  // slices are not written in order
      for (const uint64_t first : firsts) {
        const uint64_t count = std::min(step, n - first);
        residual.read(first, count, read.data() + first);
        residual.write(first, count, after.data() + first);
      }
      EXPECT_EQ(read, decoded) << n << " by " << step;
      EXPECT_TRUE(next == encoded(*kCodec, after)) << n << " by " << step;
      EXPECT_TRUE(kept == encoded(*kCodec, before));
    }
  }
}

TEST(CodedResidual, ANaNIsRefused) {
  std::vector<float> x = normal(600, 3);
  const Bytes kept = encoded(*kCodec, x);
  Bytes next = kept;
  x[550] = NAN;
  EXPECT_THROW(CodedResidual(*kCodec, 600, kept, next).write(0, 600, x.data()), NonFiniteError);
}

}  // namespace
}  // namespace lowcomm

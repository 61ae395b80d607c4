// A NaN has the same bits at the end of every sum, on a device as on the host: whichever term brings it, and of
// infinities that cancel.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/narrow_float.h"
#include "collective_cases.h"
#include "cuda/on_device.h"
#include "cuda/run_kernels.h"
#include "kernels/reduce.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::OnDevice;

constexpr uint64_t kCount = 1500;
constexpr int kTerms = 3;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class CudaNanSums : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

// Ranks' elements: NaNs with signs and payloads at 3 in the first, at 600 in the own and at 1499 in the last; at 1100
// the first's infinity meets the own one's.
Bytes elementsOf(int rank, DType dtype) {
  Bytes x = test::randomTensor(dtype, kCount, static_cast<uint32_t>(rank + 1));
  const auto put = [&](uint64_t at, float value) { test::fromFloat(dtype, x.data() + at * itemBytes(dtype), value); };
  if (rank == 0) put(3, floatOf(0xffc12345u));
  if (rank == 1) put(600, floatOf(0xffd00000u));
  if (rank == 2) put(1499, floatOf(0x7fa55555u));
  if (rank == 0) put(1100, kInfinity);
  if (rank == 1) put(1100, -kInfinity);
  return x;
}

struct SumResult {
  std::shared_ptr<const Codec> codec;
  DType dtype;
  Bytes own = elementsOf(1, dtype);
  std::vector<Bytes> payloads;  // the own one's is not used

  SumResult(const std::string& name, DType type) : codec(makeCodec(CodecSpec::parse(name))), dtype(type) {
    for (int rank = 0; rank < kTerms; ++rank) {
      payloads.emplace_back(codec->encodedBytes(kCount, dtype));
      codec->encode(payloads.back(), elementsOf(rank, dtype).data(), dtype, 0, kCount, test::drawsOf(rank));
    }
  }

  bool exact() const { return codec->spec().id == CodecId::none; }

  Bytes here(int average_over) const {
    std::vector<float> acc(kCount);
    for (int rank = 0; rank < kTerms; ++rank) {
      const void* x = rank == 1 ? own.data() : payloads[rank].data();
      if (rank != 1 && !exact()) {
        rank == 0 ? codec->decode(acc.data(), DType::float32, payloads[rank], 0, kCount)
                  : codec->decodeAdd(acc.data(), dtype, payloads[rank], 0, kCount);
      } else {
        rank == 0 ? reduceAssign(acc.data(), x, dtype, kCount)
                  : reduceInto(acc.data(), x, dtype, ReduceKind::sum, kCount);
      }
    }
    Bytes out(own.size());
    reduceFinish(out.data(), acc.data(), dtype, kCount, average_over);
    return out;
  }

  Bytes there(int average_over) const {
    cuda::RunKernels kernels(cuda::Place{});
    Run run;
    run.codec = makeCodec(codec->spec());
    run.count = kCount;
    run.bytes = run.whole = codec->encodedBytes(kCount, dtype);
    OnDevice<std::byte> workspace(kernels.workspaceBytes(run, dtype) + 1, std::byte{0xff});
    OnDevice<std::byte> out(own.size(), std::byte{0xff});
    OnDevice<uint32_t> refused(1, 0u);
    OnDevice<std::byte> first{std::span<const std::byte>(payloads[0])}, mine{std::span<const std::byte>(own)},
        last{std::span<const std::byte>(payloads[2])};
    const std::vector<StagedTerm> terms = {{first.data(), nullptr}, {nullptr, mine.data()}, {last.data(), nullptr}};
    kernels.sum(run, out.data(), dtype, terms, average_over, workspace.data(), refused.data());
    EXPECT_EQ(refused.host()[0], 0u);
    return out.host();
  }
};

// Numbers of NaNs of `x`, or -1 where one is another than reductions end with.
int nansOf(const Bytes& x, DType dtype) {
  int nans = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    const float value = test::toFloat(dtype, x.data() + i * itemBytes(dtype));
    if (value == value) continue;
    if (floatBits(value) != 0x7fc00000u) return -1;
    ++nans;
  }
  return nans;
}

TEST_F(CudaNanSums, HaveTheSameBitsByEveryCodec) {
  for (const std::string name : {"none", "minmax4:bucket=64,nonfinite=poison", "sym8:bucket=2048,nonfinite=poison",
                                 "minmax4:bucket=512,rotate=1,nonfinite=poison"}) {
    for (DType dtype : test::kFloats) {
      const SumResult sum(name, dtype);
      for (int average_over : {0, kTerms}) {
        SCOPED_TRACE(name + " " + dtypeName(dtype) + " over " + std::to_string(average_over));
        const Bytes expected = sum.here(average_over);
        EXPECT_GE(nansOf(expected, dtype), 4);
        EXPECT_EQ(sum.there(average_over), expected);
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm

// More than 2^31 elements: only where a device has the memory, and never simulated.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "codec/nonfinite.h"
#include "cuda/grid.h"
#include "cuda/on_device.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::must;

class Memory {
 public:
  explicit Memory(size_t bytes) {
    void* at = nullptr;
    must(cudaMalloc(&at, bytes));
    at_ = static_cast<std::byte*>(at);
    must(cudaMemset(at_, 0, bytes));
  }
  ~Memory() { static_cast<void>(cudaFree(at_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* at(size_t byte) { return at_ + byte; }

 private:
  std::byte* at_ = nullptr;
};

// A warp takes whole buckets, or a thread block one; the sums of sign1 have a way of their own, and so has the rotated
// block at the end.
class CudaLarge : public testing::TestWithParam<const char*> {};

TEST_P(CudaLarge, TheEndOfARunOfMoreThan2To31Elements) {
  constexpr uint64_t kFirst = uint64_t{1} << 31, kTail = 513, kCount = kFirst + kTail;
  size_t free = 0, total = 0;
  if (cuda::deviceCount() == 0 || cudaMemGetInfo(&free, &total) != cudaSuccess || free < size_t{12} << 30) {
    GTEST_SKIP() << "no CUDA device with 12 GiB free";
  }
  const GridCodec codec = test::gridCodec(GetParam(), *scalarKernels());
  const CodecSpec& spec = codec.spec();
  const cuda::GridRun run{spec, DType::float32, kCount};
  const std::vector<float> tail = test::normal(kTail, 4);
  const test::Bytes expected = test::encoded(codec, tail, {1, 2, 3}, kFirst);

  Memory x(kCount * 4), payload(codec.encodedBytes(kCount, DType::float32)), flag(4);
  must(cudaMemcpy(x.at(kFirst * 4), tail.data(), kTail * 4, cudaMemcpyDefault));
  auto* refused = reinterpret_cast<uint32_t*>(flag.at(0));
  cuda::encodeGrid({}, run, payload.at(0), x.at(0), 0, {1, 2, 3}, refused);
  must(cudaDeviceSynchronize());

  test::Bytes got(expected.size());
  const size_t sent = gridFamily(spec.id)->centred ? 4 : 8, before = sent * (kFirst / spec.bucket);
  const size_t words = up64(before + sent), bits = spec.bits;
  must(cudaMemcpy(got.data(), payload.at(before), sent, cudaMemcpyDefault));
  must(cudaMemcpy(got.data() + 64, payload.at(words + kFirst / 8 * bits), got.size() - 64, cudaMemcpyDefault));
  EXPECT_EQ(got, expected);

  must(cudaMemset(x.at(0), 0xff, kCount * 4));
  cuda::decodeGrid({}, run, x.at(0), payload.at(0), refused);
  must(cudaDeviceSynchronize());
  std::vector<float> y(kTail);
  must(cudaMemcpy(y.data(), x.at(kFirst * 4), kTail * 4, cudaMemcpyDefault));
  EXPECT_EQ(y, test::decoded(codec, expected, kTail, kFirst));

  must(cudaMemset(x.at(0), 0, kCount * 4));
  cuda::decodeAddGrid({}, run, reinterpret_cast<float*>(x.at(0)), payload.at(0), refused);
  must(cudaDeviceSynchronize());
  must(cudaMemcpy(y.data(), x.at(kFirst * 4), kTail * 4, cudaMemcpyDefault));
  EXPECT_EQ(y, test::decoded(codec, expected, kTail, kFirst));
  uint32_t raised = 1;
  must(cudaMemcpy(&raised, refused, 4, cudaMemcpyDefault));
  EXPECT_EQ(raised, 0u);
}

INSTANTIATE_TEST_SUITE_P(Codecs, CudaLarge,
                         testing::Values("qsgd4:bucket=1024", "lattice3:bucket=65536", "sign1:bucket=64",
                                         "minmax4:rotate=1", "gauss4:bucket=1024,meta=fp32"),
                         [](const auto& info) {
                           return std::string(info.param).substr(0, std::string(info.param).find(':'));
                         });

}  // namespace
}  // namespace lowcomm

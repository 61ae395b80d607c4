// Codecs whose tensors are not cut, at both ends of a tensor that is 0 between: small ones anywhere, more than 2^31
// elements only where a device has the memory.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "codec/nonfinite.h"
#include "codec/topk.h"
#include "cuda/grid.h"
#include "cuda/on_device.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::must;

class Memory {
 public:
  explicit Memory(size_t bytes) {
    must(cudaMalloc(&at_, bytes));
    must(cudaMemset(at_, 0, bytes));
  }
  ~Memory() { static_cast<void>(cudaFree(at_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* at(size_t byte) { return static_cast<std::byte*>(at_) + byte; }
  template <class T>
  std::vector<T> host(size_t byte, size_t count) {
    std::vector<T> out(count);
    must(cudaDeviceSynchronize());
    must(cudaMemcpy(out.data(), at(byte), count * sizeof(T), cudaMemcpyDefault));
    return out;
  }

 private:
  void* at_ = nullptr;
};

class CudaLargeUncut : public testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override {
    size_t free = 0, total = 0;
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
    if (first() < uint64_t{1} << 31) return;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess || free < size_t{12} << 30) GTEST_SKIP() << "no 12 GiB free";
  }
  static uint64_t first() { return GetParam(); }  // of the elements at the end that are not 0
};

TEST_P(CudaLargeUncut, ChannelsByTheRowsAtTheirEnd) {
  constexpr uint64_t kChannels = 512, kTail = 3 * kChannels;
  const uint64_t count = first() + kTail;
  const auto codec = test::codecOf("mid3:axis=channel,C=512", *scalarKernels());
  const std::vector<float> tail = test::normal(kTail, 4);
  const Bytes expected = test::encoded(*codec, tail);  // 0 changes no channel's largest magnitude

  const cuda::GridRun run{codec->spec(), DType::float32, count};
  Memory x(count * 4), payload(codec->encodedBytes(count, DType::float32)), flag(4);
  Memory workspace(cuda::uncutWorkspaceBytes(run));
  auto* refused = reinterpret_cast<uint32_t*>(flag.at(0));
  must(cudaMemcpy(x.at(first() * 4), tail.data(), kTail * 4, cudaMemcpyDefault));
  cuda::encodeUncut({}, run, payload.at(0), x.at(0), {}, workspace.at(0), refused);
  const size_t meta = kChannels * 4;
  Bytes got = payload.host<std::byte>(0, meta);
  const Bytes words = payload.host<std::byte>(meta + first() / 8 * 3, expected.size() - meta);
  got.insert(got.end(), words.begin(), words.end());
  EXPECT_EQ(got, expected);

  must(cudaMemset(x.at(0), 0xff, count * 4));
  cuda::decodeUncut({}, run, x.at(0), payload.at(0), workspace.at(0), refused);
  EXPECT_EQ(x.host<float>(first() * 4, kTail), test::decoded(*codec, expected, kTail));
  EXPECT_EQ(flag.host<uint32_t>(0, 1)[0], 0u);
}

// The elements at the end are sent, and as many zeros from the start as k has room for.
TEST_P(CudaLargeUncut, TopkByItsLargestAtTheEnd) {
  constexpr uint64_t kTail = 513, kMore = 700;
  const uint64_t count = first() + kTail;
  CodecSpec spec = CodecSpec::parse("topk:values=minmax4");
  for (bool listed : {true, false}) {
    spec.keep = listed ? static_cast<double>(kTail + kMore) / static_cast<double>(count) : 0.07;
    const TopkParts parts = topkParts(spec, count);
    ASSERT_EQ(parts.listed, listed);
    const std::vector<float> tail = test::normal(kTail, 4);
    const Bytes values = [&] {
      const auto codec = makeCodec(valueSpec(spec), *scalarKernels());
      std::vector<float> sent(parts.k - kTail);
      sent.insert(sent.end(), tail.begin(), tail.end());
      return test::encoded(*codec, sent);
    }();

    const cuda::GridRun run{spec, DType::float32, count};
    Memory x(count * 4), payload(parts.values + values.size()), workspace(cuda::topkWorkspaceBytes(run)), flag(4);
    auto* refused = reinterpret_cast<uint32_t*>(flag.at(0));
    must(cudaMemcpy(x.at(first() * 4), tail.data(), kTail * 4, cudaMemcpyDefault));
    cuda::encodeTopk({}, run, payload.at(0), x.at(0), {}, workspace.at(0), refused);
    EXPECT_EQ(payload.host<std::byte>(parts.values, values.size()), values);
    EXPECT_EQ(payload.host<uint64_t>(0, 1)[0], parts.k);
    if (listed) {
      const uint64_t blocks = first() / 65536 + 1;
      std::vector<uint32_t> counts(blocks);
      counts.front() = kMore;
      counts.back() = kTail;
      EXPECT_EQ(payload.host<uint32_t>(16, blocks), counts);
      std::vector<uint16_t> places(parts.k);
      for (uint64_t i = 0; i < parts.k; ++i)
        places[i] = static_cast<uint16_t>(i < kMore ? i : i - kMore);
      EXPECT_EQ(payload.host<uint16_t>(16 + 4 * blocks, parts.k), places);
    } else {
      Bytes bits((count + 7) / 8);
      for (uint64_t i = 0; i < count; ++i) {
        if (i < parts.k - kTail || i >= first()) bits[i / 8] |= std::byte(1u << i % 8);
      }
      EXPECT_TRUE(payload.host<std::byte>(16, bits.size()) == bits);
    }

    must(cudaMemset(x.at(0), 0xff, count * 4));
    cuda::decodeTopk({}, run, x.at(0), payload.at(0), workspace.at(0), refused);
    const std::vector<float> sent = test::decoded(*makeCodec(valueSpec(spec), *scalarKernels()), values, parts.k);
    EXPECT_EQ(x.host<float>(first() * 4, kTail), std::vector<float>(sent.end() - kTail, sent.end()));
    EXPECT_EQ(x.host<float>(0, kMore), std::vector<float>(sent.begin(), sent.begin() + kMore));
    EXPECT_EQ(x.host<float>((first() - 1) * 4, 1)[0], 0.0f);
    EXPECT_EQ(flag.host<uint32_t>(0, 1)[0], 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(From, CudaLargeUncut, testing::Values(uint64_t{1} << 17, uint64_t{1} << 31),
                         [](const auto& info) { return "2To" + std::to_string(std::countr_zero(info.param)); });

}  // namespace
}  // namespace lowcomm

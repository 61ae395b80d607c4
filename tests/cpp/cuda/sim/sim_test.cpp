// The simulator itself: what it must see, it sees.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace lowcomm {
namespace {

template <class... Params, class... Args>
void run(unsigned blocks, unsigned threads, void (*kernel)(Params...), Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  ASSERT_EQ(cudaLaunchKernelEx(&config, kernel, args...), cudaSuccess);
}

// y[i] = the sum over the other threads' x, through shared memory.
template <bool kBarrier>
__global__ void sumOfOthers(int* y) {
  __shared__ int all[64];
  all[threadIdx.x] = static_cast<int>(blockIdx.x * 100 + threadIdx.x);
  if (kBarrier) __syncthreads();
  int sum = 0;
  for (unsigned t = 0; t < blockDim.x; ++t)
    sum += t == threadIdx.x ? 0 : all[t];
  y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

std::vector<int> sums(void (*kernel)(int*)) {
  std::vector<int> y(2 * 64);
  run(2, 64, kernel, y.data());
  return y;
}

TEST(Simulator, ThreadsMeetAtABarrier) {
  const std::vector<int> y = sums(sumOfOthers<true>);
  for (int i = 0; i < 128; ++i)
    EXPECT_EQ(y[i], 64 * 63 / 2 + i / 64 * 6300 - i % 64) << i;
}

TEST(Simulator, AForgottenBarrierShows) {
  EXPECT_NE(sums(sumOfOthers<false>), sums(sumOfOthers<true>));
}

__global__ void shuffles(unsigned* y) {
  const unsigned me = threadIdx.x % 32;
  const unsigned from = __shfl_sync(0xffffffffu, me, 31 - me);
  const unsigned other = __shfl_xor_sync(0xffffffffu, me, 5);
  const unsigned next = __shfl_down_sync(0xffffffffu, me, 3);
  y[threadIdx.x] = from * 10000 + other * 100 + next;
}

TEST(Simulator, ShufflesStayInTheirWarp) {
  std::vector<unsigned> y(96);
  run(1, 96, shuffles, y.data());
  for (unsigned t = 0; t < 96; ++t) {
    const unsigned me = t % 32;
    EXPECT_EQ(y[t], (31 - me) * 10000 + (me ^ 5) * 100 + (me + 3 < 32 ? me + 3 : me)) << t;
  }
}

__global__ void ballots(unsigned* y) {
  y[threadIdx.x] = __ballot_sync(0xffffffffu, threadIdx.x % 3 == 0);
}

TEST(Simulator, ABallotIsOfTheWarp) {
  std::vector<unsigned> y(64);
  run(1, 64, ballots, y.data());
  for (unsigned t = 0; t < 64; ++t)
    EXPECT_EQ(y[t], t < 32 ? 0x49249249u : 0x92492492u) << t;
}

__global__ void divergent(bool in_warp) {
  if (threadIdx.x == 7) return;
  in_warp ? static_cast<void>(__shfl_sync(0xffffffffu, 1, 0)) : __syncthreads();
}

TEST(Simulator, WaitingForThreadsThatNeverComeIsAnError) {
  EXPECT_THROW(run(1, 64, divergent, true), std::logic_error);
  EXPECT_THROW(run(1, 64, divergent, false), std::logic_error);
}

}  // namespace
}  // namespace lowcomm

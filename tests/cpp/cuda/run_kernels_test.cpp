// A device codec's kernels next to the host's codecs, and whole collectives on them.
#include "cuda/run_kernels.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "codec/float_codec.h"
#include "codec/fused.h"
#include "collective/all_reduce.h"
#include "collective/collectives.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "cuda/accumulate.h"
#include "cuda/on_device.h"
#include "kernels/reduce.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using namespace test;

// The device's memory and its default stream. One rank at a time: the simulator is one.
std::mutex device;

class CudaQueue final : public CodecQueue {
 public:
  Memory deviceMemory(size_t bytes) override {
    void* at = nullptr;
    must(cudaMalloc(&at, bytes + 64));
    return freed(at, [](void* memory) { static_cast<void>(cudaFree(memory)); });
  }
  Memory pinnedMemory(size_t bytes) override {
    void* at = nullptr;
    must(cudaMallocHost(&at, bytes + 64));
    return freed(at, [](void* memory) { static_cast<void>(cudaFreeHost(memory)); });
  }
  Wait mark() override {
    return [] { must(cudaStreamSynchronize(nullptr)); };
  }

 private:
  template <class F>
  static Memory freed(void* at, F free) {
    const size_t over = reinterpret_cast<uintptr_t>(at) % 64;
    return {static_cast<std::byte*>(at) + (over ? 64 - over : 0), [at, free](std::byte*) { free(at); }};
  }
};

class OneAtATime final : public CodecKernels {
 public:
  bool takes(const CodecSpec& codec, DType dtype) const override { return kernels_.takes(codec, dtype); }
  size_t workspaceBytes(const Run& run, DType dtype) const override { return kernels_.workspaceBytes(run, dtype); }
  void copy(void* to, const void* from, size_t bytes) override {
    std::lock_guard<std::mutex> lock(device);
    kernels_.copy(to, from, bytes);
  }
  void clear(void* at, size_t bytes) override {
    std::lock_guard<std::mutex> lock(device);
    kernels_.clear(at, bytes);
  }
  void encode(const Run& run, void* payload, const void* x, DType dtype, const Draws& draws, void* workspace,
              uint32_t* refused) override {
    std::lock_guard<std::mutex> lock(device);
    kernels_.encode(run, payload, x, dtype, draws, workspace, refused);
  }
  void decode(const Run& run, void* y, DType dtype, const void* payload, void* workspace, uint32_t* refused) override {
    std::lock_guard<std::mutex> lock(device);
    kernels_.decode(run, y, dtype, payload, workspace, refused);
  }
  void sum(const Run& run, void* out, DType dtype, std::span<const StagedTerm> terms, int average_over, void* workspace,
           uint32_t* refused) override {
    std::lock_guard<std::mutex> lock(device);
    kernels_.sum(run, out, dtype, terms, average_over, workspace, refused);
  }
  void encodeSum(const Run& run, void* payload, DType dtype, std::span<const StagedTerm> terms, int average_over,
                 const Draws& draws, void* workspace, uint32_t* refused) override {
    std::lock_guard<std::mutex> lock(device);
    kernels_.encodeSum(run, payload, dtype, terms, average_over, draws, workspace, refused);
  }

 private:
  cuda::RunKernels kernels_{cuda::Place{}};
};

class RunKernels : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

OnDevice<std::byte> there(const Bytes& bytes) {
  return OnDevice<std::byte>(std::span<const std::byte>(bytes));
}

Run runOf(const std::string& codec, DType dtype, uint64_t count) {
  Run run;
  run.codec = makeCodec(CodecSpec::parse(codec));
  run.count = count;
  run.bytes = run.whole = run.codec->encodedBytes(count, dtype);
  return run;
}

// Four ranks' contributions, of which the second is this rank's own.
TEST_F(RunKernels, HaveTheHostsBits) {
  cuda::RunKernels kernels(cuda::Place{});
  for (const std::string& name : test::kCodecs) {
    for (DType dtype : test::kFloats) {
      if (!kernels.takes(CodecSpec::parse(name), dtype)) continue;
      for (uint64_t any : {uint64_t{1}, uint64_t{1700}}) {
        const uint64_t n = test::wholeRows(any, name);
        const lowcomm::Run run = runOf(name, dtype, n);
        const std::string what = name + " of " + std::to_string(n) + " " + dtypeName(dtype);
        OnDevice<std::byte> workspace(kernels.workspaceBytes(run, dtype) + 1, std::byte{0xff});
        OnDevice<uint32_t> refused(1, 0u);
        std::vector<Bytes> payloads;
        std::vector<std::unique_ptr<OnDevice<std::byte>>> held;
        std::vector<StagedTerm> terms;
        std::vector<Contribution> contributions;
        const Bytes own = test::randomTensor(dtype, n, 9);
        for (int rank = 0; rank < 4; ++rank) {
          const Bytes x = test::randomTensor(dtype, n, static_cast<uint32_t>(rank + 1));
          auto elements = there(x);
          OnDevice<std::byte> payload(run.whole, std::byte{0xff});
          kernels.encode(run, payload.data(), elements.data(), dtype, drawsOf(rank), workspace.data(), refused.data());
          Bytes expected(run.whole);
          run.codec->encode(expected, x.data(), dtype, 0, n, drawsOf(rank));
          ASSERT_EQ(payload.host(), expected) << what;
          OnDevice<std::byte> y(x.size(), std::byte{0xff});
          kernels.decode(run, y.data(), dtype, payload.data(), workspace.data(), refused.data());
          Bytes decoded(x.size());
          run.codec->decode(decoded.data(), dtype, expected, 0, n);
          ASSERT_EQ(y.host(), decoded) << what;
          payloads.push_back(expected);
        }
        for (int rank = 0; rank < 4; ++rank) {
          held.push_back(
              std::make_unique<OnDevice<std::byte>>(std::span<const std::byte>(rank == 1 ? own : payloads[rank])));
          terms.push_back(rank == 1 ? StagedTerm{nullptr, held.back()->data()}
                                    : StagedTerm{held.back()->data(), nullptr});
          contributions.push_back(rank == 1 ? Contribution{{}, own.data()} : Contribution{payloads[rank]});
        }
        for (int average_over : {0, 4}) {
          std::vector<float> acc(n);
          for (int rank = 0; rank < 4; ++rank) {
            const bool exact = CodecSpec::parse(name).id == CodecId::none;
            if (rank == 1 || exact) {
              const void* x = rank == 1 ? own.data() : payloads[rank].data();
              rank == 0 ? reduceAssign(acc.data(), x, dtype, n) : reduceInto(acc.data(), x, dtype, ReduceKind::sum, n);
            } else if (rank == 0) {
              run.codec->decode(acc.data(), DType::float32, payloads[rank], 0, n);
            } else {
              run.codec->decodeAdd(acc.data(), dtype, payloads[rank], 0, n);
            }
          }
          Bytes expected(own.size());
          reduceFinish(expected.data(), acc.data(), dtype, n, average_over);
          OnDevice<std::byte> out(own.size(), std::byte{0xff});
          kernels.sum(run, out.data(), dtype, terms, average_over, workspace.data(), refused.data());
          ASSERT_EQ(out.host(), expected) << what << ", sum over " << average_over;
          if (name == "none") continue;
          Bytes codes(run.whole);
          FusedCodec(run.codec).encodeSum(codes, expected.data(), dtype, contributions, average_over, 0, n, drawsOf(1));
          OnDevice<std::byte> payload(run.whole, std::byte{0xff});
          kernels.encodeSum(run, payload.data(), dtype, terms, average_over, drawsOf(1), workspace.data(),
                            refused.data());
          ASSERT_EQ(payload.host(), codes) << what << ", codes of the sum over " << average_over;
        }
        EXPECT_EQ(refused.host()[0], 0u) << what;
      }
    }
  }
}

TEST_F(RunKernels, TakeWhatHasNoTableAndIsOfFloats) {
  const cuda::RunKernels kernels(cuda::Place{});
  EXPECT_FALSE(kernels.takes(CodecSpec::parse("levels4"), DType::float32));
  for (const char* name :
       {"minmax4:axis=channel", "sym4:axis=channel,C=64", "qsgd8:bucket=tensor", "topk", "fp16", "log9"})
    EXPECT_FALSE(kernels.takes(CodecSpec::parse(name), DType::float32)) << name;
  for (const char* name :
       {"minmax1:bucket=64", "sym4:bucket=128,meta=bf16", "qsgd4:bucket=512,meta=bf16,rotate=1", "gauss4"})
    EXPECT_TRUE(kernels.takes(CodecSpec::parse(name), DType::bfloat16)) << name;
  EXPECT_FALSE(kernels.takes(CodecSpec::parse("gauss4:unit=576"), DType::float32));
  EXPECT_FALSE(kernels.takes(CodecSpec{}, DType::int32));
  EXPECT_FALSE(kernels.takes(CodecSpec{}, DType::float64));
  EXPECT_TRUE(kernels.takes(CodecSpec{}, DType::float16));
  EXPECT_TRUE(cuda::runsOn(0));
}

// A rank whose tensors are on the device, one whose are on the host.
TEST_F(RunKernels, CollectivesOfADeviceAndAHost) {
  for (const char* name : {"sym4:bucket=128", "qsgd8:bucket=512", "gauss4"}) {
    const CodecSpec codec = CodecSpec::parse(name);
    const uint64_t n = 70001;
    const DType dtype = DType::float16;
    std::vector<std::vector<Bytes>> results;
    for (bool staged : {false, true}) {
      Ranks ranks(2);
      std::vector<Bytes> x, gathered(2, Bytes(4 * n)), scattered(2, Bytes(n / 2 * 2));
      for (int rank = 0; rank < 2; ++rank)
        x.push_back(test::randomTensor(dtype, n, static_cast<uint32_t>(rank + 1)));
      ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
        const bool here = staged && rank == 1;
        auto own = there(x[rank]), all = there(gathered[rank]), part = there(scattered[rank]);
        const auto device_codec =
            here ? std::make_unique<DeviceCodec>(std::make_unique<CudaQueue>(), std::make_unique<OneAtATime>(),
                                                 op.group.chunk_bytes)
                 : nullptr;
        std::byte* data = here ? own.data() : x[rank].data();
        std::byte* out = here ? all.data() : gathered[rank].data();
        std::byte* slice = here ? part.data() : scattered[rank].data();
        GatherMessage gather;
        gather.layouts = {test::single(n, name)};
        gather.dtype = dtype;
        gather.input = data;
        gather.outputs = {out, out + 2 * n};
        gather.draws = drawsOf(rank);
        gather.device_codec = device_codec.get();
        allGather(op, {gather});
        ScatterMessage scatter;
        scatter.layouts = {test::single(n / 2, name)};
        scatter.dtype = dtype;
        scatter.inputs = {data, data + n / 2 * 2};
        scatter.output = slice;
        scatter.draws = drawsOf(rank);
        reduceScatter(op, {scatter}, {}, device_codec.get());
        const AllReduceMessage reduce{n, codec, dtype, data, drawsOf(rank)};
        allReduce(op, {reduce}, {}, device_codec.get());
        if (!here) return;
        x[rank] = own.host();
        gathered[rank] = all.host();
        scattered[rank] = part.host();
      });
      x.insert(x.end(), gathered.begin(), gathered.end());
      x.insert(x.end(), scattered.begin(), scattered.end());
      results.push_back(x);
    }
    for (size_t i = 0; i < results[0].size(); ++i)
      EXPECT_TRUE(results[1][i] == results[0][i]) << name << ", " << i;
  }
}

}  // namespace
}  // namespace lowcomm

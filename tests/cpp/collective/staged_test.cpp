// Collectives whose elements are on a device: the bits of those in host memory, whoever else stages.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "oracles.h"
#include "staged_cases.h"

namespace lowcomm {
namespace {

using namespace test;

std::vector<Bytes> tensorsOf(int ranks, DType dtype, uint64_t n, uint32_t seed = 1) {
  std::vector<Bytes> tensors;
  for (int rank = 0; rank < ranks; ++rank)
    tensors.push_back(test::randomTensor(dtype, n, seed + static_cast<uint32_t>(rank)));
  return tensors;
}

// `run` leaves the same whoever stages.
template <class Run>
void expectHostsBits(const Run& run, const std::string& of) {
  const std::vector<Bytes> host = run(kNobody);
  EXPECT_TRUE(run(kAll) == host) << of << ", all stage";
  EXPECT_TRUE(run(kEven) == host) << of << ", some stage";
}

TEST(Staged, AllReduceHasTheHostsBits) {
  for (const std::string& name : test::kCodecs) {
    if (name == "none") continue;
    const CodecSpec codec = CodecSpec::parse(name);
    for (int size : {2, 3, 4}) {
      Ranks ranks(size);
      for (DType dtype : test::kFloats) {
        for (const Reduction& reduction : {kSum, kAverage}) {
          for (uint64_t any : {uint64_t{1}, uint64_t{700}, uint64_t{12 * 57344 + 13}}) {
            if (any > 1000 && (size != 3 || dtype == DType::float16 || reduction.average)) continue;
            const uint64_t n = test::wholeRows(any, name);
            const auto run = [&](Staging staging) {
              std::vector<Bytes> tensors = tensorsOf(size, dtype, n);
              ranks.expectRun("all_reduce", on(staging, [&](int rank, OpContext& op, DeviceCodec* device_codec) {
                                allReduce(op, {{n, codec, dtype, tensors[rank].data(), drawsOf(rank)}}, reduction,
                                          device_codec);
                              }));
              return tensors;
            };
            expectHostsBits(run, name + " " + std::string(dtypeName(dtype)) + " " + reduction.name() + ", " +
                                     std::to_string(n) + " elements, " + std::to_string(size) + " ranks");
          }
        }
      }
    }
  }
}

TEST(Staged, SeveralTensorsOfAnySizes) {
  const std::vector<std::pair<uint64_t, const char*>> cases = {
      {0, "sym4"}, {5, "qsgd8:bucket=64"}, {300000, "minmax4"}, {70000, "topk:keep=0.9"}, {100000, "sym4:bucket=128"}};
  for (int size : {2, 4}) {
    Ranks ranks(size);
    const auto run = [&](Staging staging) {
      std::vector<Bytes> all;
      for (int rank = 0; rank < size; ++rank) {
        for (size_t t = 0; t < cases.size(); ++t)
          all.push_back(test::randomTensor(DType::float32, cases[t].first, static_cast<uint32_t>(7 * rank + t)));
      }
      ranks.expectRun("all_reduce", on(staging, [&](int rank, OpContext& op, DeviceCodec* device_codec) {
                        std::vector<AllReduceMessage> messages;
                        for (size_t t = 0; t < cases.size(); ++t) {
                          messages.push_back({cases[t].first, CodecSpec::parse(cases[t].second), DType::float32,
                                              all[static_cast<size_t>(rank) * cases.size() + t].data(),
                                              drawsOf(rank, static_cast<uint32_t>(t * 16))});
                        }
                        allReduce(op, messages, kSum, device_codec);
                      }));
      return all;
    };
    expectHostsBits(run, std::to_string(size));
  }
}

// Layouts of all codecs, exact parts among them; parts that differ by rank; outputs where the input is.
TEST(Staged, AllGatherHasTheHostsBits) {
  for (int size : {2, 3, 4}) {
    Ranks ranks(size);
    for (DType dtype : test::kFloats) {
      for (uint64_t first : {0, 1, 300001}) {
        // Of many codecs, alike on all ranks; or of one, a rank's own length each.
        std::vector<Layout> layouts(size, test::mixedLayout(12, 9));
        for (int rank = 0; first > 0 && rank < size; ++rank)
          layouts[rank] = test::single(rank > 0 ? 1000 * static_cast<uint64_t>(rank) + 7 : first, "minmax4");
        for (Staging staging : {kAll, kEven}) {
          test::Gather gather(size, {{layouts, dtype}}, /*in_place=*/true);
          ranks.expectRun("all_gather", on(staging, std::ref(gather)));
          gather.expectDefinition();
        }
      }
    }
  }
}

TEST(Staged, ReduceScatterHasTheHostsBits) {
  for (int size : {2, 3, 4}) {
    Ranks ranks(size);
    for (DType dtype : test::kFloats) {
      for (const Reduction& reduction : {kSum, kAverage}) {
        std::vector<Layout> uneven;
        for (int rank = 0; rank < size; ++rank)
          uneven.push_back(test::single(rank == 1 ? 1 : 70000 * static_cast<uint64_t>(rank + 1), "sym8:bucket=128"));
        for (const TensorKind& tensor :
             {TensorKind(test::single(200013, "qsgd4:bucket=64"), dtype), TensorKind(test::mixedLayout(14, 1), dtype),
              TensorKind(test::mixedLayout(14, 2), dtype), TensorKind(uneven, dtype)}) {
          for (Staging staging : {kAll, kEven}) {
            test::Scatter scatter(size, {tensor}, reduction, /*in_place=*/tensor.layouts.size() > 1);
            ranks.expectRun("reduce_scatter", on(staging, std::ref(scatter)));
            scatter.expectDefinition();
          }
        }
      }
    }
  }
}

TEST(Staged, RootedOnesHaveTheHostsBits) {
  for (const std::string& name : test::kCodecs) {
    if (name == "none") continue;
    for (int size : {2, 3}) {
      Ranks ranks(size);
      for (uint64_t any : {uint64_t{0}, uint64_t{700}, uint64_t{5 * 57344 + 13}}) {
        const uint64_t n = test::wholeRows(any, name);
        const DType dtype = DType::bfloat16;
        const int root = size - 1;
        const auto run = [&](Staging staging) {
          std::vector<Bytes> tensors = tensorsOf(size, dtype, n), gathered(size, Bytes(2 * n));
          const std::vector<Bytes> inputs = tensors;
          ranks.expectRun("broadcast", on(staging, [&](int rank, OpContext& op, DeviceCodec* device_codec) {
                            BroadcastMessage message{
                                n, CodecSpec::parse(name), dtype, tensors[rank].data(), drawsOf(rank), device_codec};
                            broadcast(op, {message}, root);
                          }));
          ranks.expectRun("gather", on(staging, [&](int rank, OpContext& op, DeviceCodec* device_codec) {
                            RootGatherMessage message{n,  CodecSpec::parse(name), dtype,       inputs[rank].data(),
                                                      {}, drawsOf(rank),          device_codec};
                            for (int r = 0; rank == root && r < size; ++r)
                              message.outputs.push_back(gathered[r].data());
                            lowcomm::gather(op, {message}, root);
                          }));
          tensors.insert(tensors.end(), gathered.begin(), gathered.end());
          return tensors;
        };
        expectHostsBits(run, name + ", " + std::to_string(n));
      }
    }
  }
}

TEST(Staged, AllToAllHasTheHostsBits) {
  for (const char* name : {"none", "qsgd4:bucket=64", "bf16", "topk"}) {
    for (int size : {2, 3}) {
      Ranks ranks(size);
      // From a to b.
      const auto count = [](int a, int b) { return static_cast<uint64_t>(a == 1 ? 0 : 90000 * b + 300 * a + 1); };
      const auto run = [&](Staging staging) {
        std::vector<Bytes> inputs, outputs;
        for (int a = 0; a < size; ++a) {
          for (int b = 0; b < size; ++b) {
            inputs.push_back(test::randomTensor(DType::float16, count(a, b), static_cast<uint32_t>(a * size + b)));
            outputs.emplace_back(2 * count(b, a));
          }
        }
        ranks.expectRun("all_to_all", on(staging, [&](int rank, OpContext& op, DeviceCodec* device_codec) {
                          AllToAllMessage message;
                          message.dtype = DType::float16;
                          for (int r = 0; r < size; ++r) {
                            message.sent.push_back(test::single(count(rank, r), name));
                            message.got.push_back(test::single(count(r, rank), name));
                            message.inputs.push_back(inputs[static_cast<size_t>(rank * size + r)].data());
                            message.outputs.push_back(outputs[static_cast<size_t>(rank * size + r)].data());
                          }
                          message.draws = drawsOf(rank);
                          message.device_codec = device_codec;
                          allToAll(op, message);
                        }));
        return outputs;
      };
      expectHostsBits(run, name + std::string(", ") + std::to_string(size));
    }
  }
}

}  // namespace
}  // namespace lowcomm

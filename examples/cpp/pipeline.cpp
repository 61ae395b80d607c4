// Two stages of a pipeline, one a thread: activations of samples that come back travel as their changes, at 2 bits an
// element, and both sides remember the same bits of them (AQ-SGD, NeurIPS 2022).
//
//     cmake --install build --prefix PREFIX
//     cmake -S examples/cpp -B build-example -DCMAKE_PREFIX_PATH="PREFIX;$(python -c 'import torch;
//     print(torch.utils.cmake_prefix_path)')" cmake --build build-example && build-example/pipeline
//
// The stages talk over the in-memory transport. Over a network an Engine takes any other Transport.
#include <lowcomm/engine/op_queue.h>
#include <lowcomm/pipeline/boundary_channel.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "memory_transport.h"

namespace {

constexpr int kVisits = 4;
constexpr uint64_t kSamples = 8, kElements = 16 * 1024;  // of each sample's activation

// An activation that moves a little from visit to visit, as weights do.
std::vector<float> activations(int visit) {
  std::vector<float> values(kSamples * kElements);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = std::sin(0.37f * static_cast<float>(i)) +
                0.05f * std::sin(static_cast<float>(visit) + 0.11f * static_cast<float>(i));
  return values;
}

void stage(int rank, lowcomm::Engine& engine) {
  lowcomm::ChannelOptions options;
  options.codecs = {lowcomm::CodecSpec::parse("gauss2"), lowcomm::CodecSpec::parse("minmax8:bucket=128")};
  options.edge = "forward boundary 0";
  const auto channel = std::make_shared<lowcomm::BoundaryChannel>(
      std::make_shared<lowcomm::EngineQueue>(engine), /*peer=*/1 - rank, /*number=*/0, options,
      std::make_shared<lowcomm::SampleMemory>(lowcomm::SlotFormat(kElements, lowcomm::DType::float16)));
  std::vector<uint64_t> samples(kSamples);
  std::iota(samples.begin(), samples.end(), 0);
  for (int visit = 0; visit < kVisits; ++visit) {
    const std::vector<float> sent = activations(visit);
    if (rank == 0) {
      channel->send(sent.data(), sent.size(), samples)->wait();
      continue;
    }
    std::vector<float> got(sent.size());
    const auto message = channel->recv(got.data(), got.size(), samples);  // posted; computing could go on here
    message->wait();
    double lost = 0, whole = 0;
    for (size_t i = 0; i < sent.size(); ++i) {
      lost += std::pow(got[i] - sent[i], 2);
      whole += std::pow(sent[i], 2);
    }
    std::printf("visit %d: relative error %.4f\n", visit, std::sqrt(lost / whole));
  }
}

}  // namespace

int main() {
  lowcomm::MemoryHub hub(2);
  std::vector<std::unique_ptr<lowcomm::Engine>> engines;
  std::vector<std::thread> threads;
  for (int rank : {0, 1})
    engines.push_back(std::make_unique<lowcomm::Engine>(hub.transport(rank), lowcomm::GroupConfig{}));
  for (int rank : {0, 1})
    threads.emplace_back(stage, rank, std::ref(*engines[rank]));
  for (std::thread& thread : threads)
    thread.join();
}

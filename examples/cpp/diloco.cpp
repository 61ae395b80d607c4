// Replicas of a small network, trained by AdamW each for itself, with an outer loop around it: three threads of one
// process over memory, or, with arguments, one of several processes over TCP.
//
//     cmake --install build --prefix PREFIX
//     cmake -S examples/cpp -B build-example -DCMAKE_PREFIX_PATH="PREFIX;$(python -c 'import torch;
//     print(torch.utils.cmake_prefix_path)')" cmake --build build-example && build-example/diloco
//
//     build-example/diloco 0 2 /shared/run1 & build-example/diloco 1 2 /shared/run1    # RANK RANKS FOLDER
//
// FOLDER is one that all processes see, and that is new for each run: addresses are exchanged there. LOWCOMM_LISTEN and
// the other variables of docs/transport.md hold here as well.
#include <lowcomm/diloco/diloco.h>
#include <lowcomm/engine/engine.h>
#include <lowcomm/engine/handshake.h>
#include <lowcomm/engine/op_queue.h>
#include <lowcomm/transport/tcp/tcp.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "file_rendezvous.h"
#include "memory_transport.h"

namespace {

constexpr int kRanks = 3, kSteps = 300;

struct Network : torch::nn::Module {
  Network()
      : in(register_module("in", torch::nn::Linear(16, 64))), out(register_module("out", torch::nn::Linear(64, 4))) {}
  torch::Tensor forward(const torch::Tensor& x) { return out->forward(torch::tanh(in->forward(x))); }
  torch::nn::Linear in, out;
};

// The loss on data that no replica has seen, of the outer parameters, and what it has sent.
struct RunResult {
  double loss = 0;
  uint64_t sent_bytes = 0;
};

RunResult train(int rank, lowcomm::Engine& engine, const std::vector<torch::Tensor>& start) {
  Network network;
  std::vector<lowcomm::OuterParameter> parameters;
  {
    torch::NoGradGuard no_grad;
    size_t i = 0;
    for (auto& named : network.named_parameters()) {
      named.value().copy_(start[i++]);
      parameters.push_back({named.key(), named.value()});
    }
  }
  lowcomm::DiLoCoXOptions options;
  options.sync_every = 10;
  options.codec = lowcomm::CodecSpec::parse("sym4:bucket=64");
  options.error_feedback = true;
  lowcomm::DiLoCoX outer(parameters, std::make_shared<lowcomm::EngineQueue>(engine), options);
  torch::optim::AdamW inner(network.parameters(), torch::optim::AdamWOptions(3e-3));
  const auto teacher = torch::sin(torch::arange(64, torch::kFloat)).reshape({16, 4});
  auto draws = at::detail::createCPUGenerator(100 + rank);
  RunResult ended;
  for (int step = 0; step < kSteps; ++step) {
    const auto x = at::randn({32, 16}, draws);
    inner.zero_grad();
    torch::mse_loss(network.forward(x), torch::matmul(x, teacher)).backward();
    inner.step();
    if (outer.step()) ended.sent_bytes += outer.report().sent_bytes;
  }
  outer.finish();
  torch::NoGradGuard no_grad;
  const auto x = at::randn({512, 16}, at::detail::createCPUGenerator(1));
  ended.loss = torch::mse_loss(network.forward(x), torch::matmul(x, teacher)).item<double>();
  return ended;
}

void print(int rank, const RunResult& ended) {
  std::printf("rank %d: loss %.6f, sent %llu bytes\n", rank, ended.loss,
              static_cast<unsigned long long>(ended.sent_bytes));
}

void runThreads(const std::vector<torch::Tensor>& start) {
  lowcomm::MemoryHub hub(kRanks);
  std::vector<std::unique_ptr<lowcomm::Engine>> engines;
  for (int rank = 0; rank < kRanks; ++rank)
    engines.push_back(std::make_unique<lowcomm::Engine>(hub.transport(rank), lowcomm::GroupConfig{}));
  std::vector<RunResult> ended(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] { ended[rank] = train(rank, *engines[rank], start); });
  for (std::thread& rank : ranks)
    rank.join();
  for (int rank = 0; rank < kRanks; ++rank)
    print(rank, ended[rank]);
}

void runProcess(int rank, int ranks, const char* folder, const std::vector<torch::Tensor>& start) {
  constexpr std::chrono::seconds kTimeout(60);
  lowcomm::FileRendezvous rendezvous(folder);
  lowcomm::GroupConfig config;
  // What the ranks of a group have to agree on is compared before they connect.
  const lowcomm::KeyValues greeting{{{"program", "diloco"}}};
  config.epoch = lowcomm::handshake(rendezvous, rank, ranks, greeting, lowcomm::thisHost(), kTimeout).epoch;
  lowcomm::Engine engine(lowcomm::connectTcp(rendezvous, rank, ranks, /*connections=*/1, kTimeout), config);
  print(rank, train(rank, engine, start));
}

}  // namespace

int main(int count, char** words) {
  torch::manual_seed(0);
  std::vector<torch::Tensor> start;
  Network first;
  for (const auto& parameter : first.parameters())
    start.push_back(parameter.detach().clone());
  try {
    count == 4 ? runProcess(std::atoi(words[1]), std::atoi(words[2]), words[3], start) : runThreads(start);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "diloco: %s\n", error.what());
    return 1;
  }
  return 0;
}

// Three replicas of a small network, one a thread, trained by AdamW each for itself, with an outer loop around it.
//
//     cmake --install build --prefix PREFIX
//     cmake -S examples/cpp -B build-example -DCMAKE_PREFIX_PATH="PREFIX;$(python -c 'import torch;
//     print(torch.utils.cmake_prefix_path)')" cmake --build build-example && build-example/diloco
//
// The replicas talk over the in-memory transport. Over a network an Engine takes any other Transport.
#include <lowcomm/engine/engine.h>
#include <lowcomm/engine/op_queue.h>
#include <lowcomm/optim/diloco.h>
#include <lowcomm/transport/memory.h>
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

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

}  // namespace

int main() {
  torch::manual_seed(0);
  std::vector<torch::Tensor> start;
  Network first;
  for (const auto& parameter : first.parameters())
    start.push_back(parameter.detach().clone());
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
    std::printf("rank %d: loss %.6f, sent %llu bytes\n", rank, ended[rank].loss,
                static_cast<unsigned long long>(ended[rank].sent_bytes));
  return 0;
}

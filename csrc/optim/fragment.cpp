#include "optim/fragment.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <c10/core/GradMode.h>

#include "base/error.h"
#include "base/float_env.h"
#include "base/hashes.h"
#include "collective/all_reduce.h"
#include "collective/summer.h"
#include "kernels/low_rank/low_rank.h"
#include "optim/gather_values.h"
#include "optim/host_parameters.h"

namespace lowcomm {
namespace {

constexpr const char* kOp = "outer_step";
const Reduction kAverage{ReduceKind::sum, /*average=*/true};

bool isFinite(const at::Tensor& tensor) {
  const float* x = tensor.const_data_ptr<float>();
  bool finite = true;
  for (int64_t i = 0; i < tensor.numel(); ++i)
    finite &= std::fabs(x[i]) <= std::numeric_limits<float>::max();
  return finite;
}

int64_t rowsOf(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? 1 : tensor.size(0);
}

bool factored(const at::Tensor& tensor, int64_t rank) {
  const int64_t rows = rowsOf(tensor), columns = rows == 0 ? 0 : tensor.numel() / rows;
  return rank > 0 && tensor.dim() >= 2 && rank < rows && rank < columns && isLowRank(rows, columns, rank);
}

}  // namespace

// A message under way: shared with its job, which may outlive the fragment.
struct Fragment::OuterMessage {
  std::vector<at::Tensor> messages;
  std::vector<std::shared_ptr<Compression>> compressions;
  std::vector<std::vector<double>> energies;  // by tensor; empty without a rank
  std::vector<double> rests;                  // by tensor: what the factors left out; 0 where it is not measured
  LowRankMessage coded;
  std::vector<AllReduceMessage> exact;
  double weight = 0;
  bool finite = false;  // coded; written on the worker, read after the ticket's wait

  // Weights are compared here, behind training: a site that is late would hold the others up otherwise.
  void weigh(OpContext& op) const {
    double sum = 0;
    for (const std::vector<double>& one : gatherNumbers({weight}, op))
      sum += one[0];
    ++op.sequence;
    const auto share = static_cast<float>(weight * op.size() / sum);
    const FloatEnv env;
    for (const at::Tensor& tensor : messages) {
      float* x = tensor.mutable_data_ptr<float>();
      for (int64_t i = 0; i < tensor.numel(); ++i)
        x[i] *= share;
    }
  }

  void run(OpContext& op) {
    if (weight > 0) weigh(op);
    op.counters.exact = !exact.empty();
    if (!exact.empty()) {
      allReduce(op, exact, kAverage);
    } else {
      finite = lowRankAllReduce(op, coded, kAverage);
    }
  }
};

Fragment::Fragment(const DiLoCoXOptions& options, std::vector<OuterParameter> parameters)
    : options_(options), next_rank_(options.rank) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (const OuterParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    if (!tensor.is_floating_point() || tensor.layout() != at::kStrided) {
      throw TypeError("DiLoCoX: " + parameter.name + ": expected a dense floating-point tensor, got " +
                      std::string(tensor.toString()));
    }
    tensors.push_back(tensor);
  }
  const HostParameters hosts(std::move(tensors));
  for (size_t i = 0; i < parameters.size(); ++i) {
    OuterParameter& parameter = parameters[i];
    const at::Tensor& tensor = parameter.tensor;
    ParameterState kept;
    if (tensor.numel() == 0) continue;  // this rank's shard of a small parameter
    kept.outer = hosts.wide(i).clone();
    kept.message = at::zeros_like(kept.outer);
    if (options.momentum > 0) kept.momentum = at::zeros_like(kept.outer);
    if (options.mode != OuterMode::sync) kept.mark = at::zeros_like(kept.outer);
    if (tensor.scalar_type() != at::kFloat) kept.rounding = at::zeros_like(kept.outer);
    if (options.mode == OuterMode::eager) {
      kept.own_message = at::zeros_like(kept.outer);
      if (options.momentum > 0) kept.own_momentum = at::zeros_like(kept.outer);
    }
    if (options.codec.id != CodecId::none) {
      kept.first_rank = factored(tensor, options.rank) ? options.rank : 0;
      kept.compression = std::make_shared<Compression>(tensor.sizes(), kept.first_rank, options.error_feedback,
                                                       options.eight_bits, options.seed + parameter.number);
    }
    kept.parameter = std::move(parameter);
    kept_.push_back(std::move(kept));
  }
}

int64_t Fragment::elements() const {
  int64_t elements = 0;
  for (const ParameterState& kept : kept_)
    elements += kept.outer.numel();
  return elements;
}

OuterRule Fragment::rule() const {
  return {options_.mode, static_cast<float>(options_.lr), static_cast<float>(options_.momentum),
          static_cast<float>(options_.alpha), 1.0f / static_cast<float>(ranks_)};
}

// f(span) of every tensor, whose parameter takes what f writes.
template <class F>
void Fragment::pass(F&& f) {
  const c10::NoGradGuard no_grad;
  const FloatEnv env;
  std::vector<at::Tensor> parameters;
  for (const ParameterState& kept : kept_)
    parameters.push_back(kept.parameter.tensor);
  HostParameters hosts(std::move(parameters));
  for (size_t i = 0; i < kept_.size(); ++i) {
    ParameterState& kept = kept_[i];
    const at::Tensor host = hosts.wide(i);
    const auto at = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
    };
    f(OuterSpan{at(host), at(kept.outer), at(kept.momentum), at(kept.mark), at(kept.message), at(kept.rounding),
                at(kept.own_message), at(kept.own_momentum), static_cast<size_t>(host.numel())});
    hosts.round(i, host);
    if (!kept.rounding.defined()) continue;
    // Training starts from what was written: what rounding added is no training.
    kept.rounding.copy_(hosts.wide(i).sub_(host));
    if (kept.mark.defined()) kept.mark.add_(kept.rounding);
  }
  hosts.store();
}

void Fragment::send(OpQueue& queue, uint32_t step, bool marks, double weight) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::idle);
  ranks_ = queue.size();
  finite_ = true;
  const OuterRule rule = this->rule();
  pass([&](const OuterSpan& s) {
    finite_ &= takeFromOuter(s);
    if (!marks) return;
    if (rule.mode == OuterMode::eager) stepOwn(s, rule, s.message, s.outer, /*arrived=*/false);
    std::memcpy(s.mark, s.parameter, s.n * sizeof(float));
  });
  this->queue(queue, step, weight);
}

void Fragment::queue(OpQueue& queue, uint32_t step, double weight) {
  const bool exact = options_.codec.id == CodecId::none;
  const CodecSpec codec = poisoning(options_.codec);
  auto flight = std::make_shared<OuterMessage>();
  flight->weight = weight;
  flight->energies.resize(kept_.size());
  flight->rests.resize(kept_.size());
  flight->coded = {DType::float32,
                   codec,
                   options_.projection.id == CodecId::none ? codec : poisoning(options_.projection),
                   // Not by the group's key: replicas of one cluster average in groups of their own, to the same bits.
                   {options_.seed, streamOf(queue.rank(), 0), step},
                   {}};
  for (size_t i = 0; i < kept_.size(); ++i) {
    ParameterState& kept = kept_[i];
    const auto elements = static_cast<uint64_t>(kept.message.numel());
    flight->messages.push_back(kept.message);
    if (exact) {
      flight->exact.push_back({elements, CodecSpec{}, DType::float32, kept.message.mutable_data_ptr<float>()});
      continue;
    }
    Compression& compression = *kept.compression;
    if (kept.first_rank > 0) compression.setRank(std::min(next_rank_, kept.first_rank));
    flight->compressions.push_back(kept.compression);
    LowRankTensor tensor{kept.message.mutable_data_ptr<float>(), elements};
    const Compression::StateView lent = compression.begin(kept.message.numel());
    tensor.residual = lent.residual;
    tensor.kept = lent.kept;
    tensor.factor = lent.factor;
    tensor.rank = static_cast<uint64_t>(compression.rank());
    if (tensor.rank > 0) {
      tensor.rows = static_cast<uint64_t>(compression.rows());
      tensor.columns = static_cast<uint64_t>(compression.columns());
    }
    if (tensor.rank > 0 && (options_.adapt_rank || options_.adapt_sync_every)) {
      flight->energies[i].resize(tensor.rank);
      tensor.energies = flight->energies[i].data();
      if (options_.adapt_to == AdaptTo::pseudo_gradient) tensor.rest = &flight->rests[i];
    }
    tensor.seed = compression.seed() + step;
    tensor.slot = kept.parameter.number * 2 * static_cast<uint64_t>(queue.size());
    tensor.first_owner = kept.parameter.number;
    flight->coded.tensors.push_back(tensor);
  }
  flight_ = flight;
  phase_ = Phase::flying;
  if (kept_.empty()) return;
  ticket_ = Ticket(queue, kOp, /*sequences=*/weight > 0 ? 3 : 2, [flight](OpContext& op) { flight->run(op); });
}

void Fragment::wait() {
  if (phase_ != Phase::flying) return;
  waited_s_ = 0;
  const auto ended = [this](bool well) {
    for (const auto& compression : flight_->compressions)
      compression->end(well);
  };
  if (ticket_.pending()) {
    const auto start = std::chrono::steady_clock::now();
    try {
      moved_ = ticket_.wait();
    } catch (...) {
      ended(false);
      forget();
      throw;
    }
    waited_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  bool finite = flight_->exact.empty() ? flight_->finite || kept_.empty() : true;
  if (!flight_->exact.empty()) {
    for (const at::Tensor& message : flight_->messages)
      finite = finite && isFinite(message);
  }
  ended(finite);
  if (!finite) {
    forget();
    throw ValueError(std::string("DiLoCoX: expected finite pseudo-gradients, got NaN or infinity ") +
                     (finite_ ? "on another rank" : "on this rank") + "; the outer step was dropped on all ranks");
  }
  effective_ = {};
  for (size_t i = 0; i < flight_->energies.size(); ++i) {
    const std::vector<double>& energies = flight_->energies[i];
    const auto first = static_cast<size_t>(kept_[i].first_rank);
    const size_t rank =
        lowcomm::effectiveRank(energies.data(), energies.size(), options_.energy, flight_->rests[i], first);
    if (rank == 0) continue;  // no matrix, or one that nobody moved
    effective_.sum += static_cast<double>(rank);
    ++effective_.matrices;
  }
  phase_ = Phase::landed;
}

void Fragment::apply(Move move) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::landed);
  const OuterRule rule = this->rule();
  pass([&](const OuterSpan& s) {
    stepOuter(s, rule);
    moveParameter(s, rule, move);
  });
  for (ParameterState& kept : kept_) {
    if (kept.compression && kept.compression->done()) kept.compression->commit();
    if (kept.own_momentum.defined()) kept.own_momentum.copy_(kept.momentum);  // own outer steps start from θ̄ next time
  }
  flight_.reset();
  phase_ = Phase::idle;
}

void Fragment::applyAndSend(OpQueue& queue, uint32_t step, double weight) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::landed);
  ranks_ = queue.size();
  finite_ = true;
  const OuterRule rule = this->rule();
  pass([&](const OuterSpan& s) { finite_ &= stepAndRestart(s, rule); });
  for (const ParameterState& kept : kept_) {
    if (kept.compression && kept.compression->done()) kept.compression->commit();
  }
  this->queue(queue, step, weight);
}

void Fragment::drop() {
  try {
    wait();
  } catch (...) {
    // Its state has rolled back already.
  }
  if (phase_ == Phase::landed) {
    for (const ParameterState& kept : kept_) {
      if (kept.compression && kept.compression->done()) kept.compression->rollBack();
    }
    forget();
  }
}

void Fragment::forget() {
  flight_.reset();
  phase_ = Phase::idle;
  for (ParameterState& kept : kept_) {
    if (kept.own_momentum.defined()) kept.own_momentum.copy_(kept.momentum);
  }
}

void Fragment::restore() {
  // A message under way is still applied, to a training that starts here.
  pass([](const OuterSpan& s) {
    std::memcpy(s.parameter, s.outer, s.n * sizeof(float));
    if (s.mark) std::memcpy(s.mark, s.outer, s.n * sizeof(float));
    if (s.own_message) std::memset(s.own_message, 0, s.n * sizeof(float));
    if (s.own_momentum) std::memcpy(s.own_momentum, s.momentum, s.n * sizeof(float));
  });
}

uint32_t Fragment::checksum() const {
  uint32_t sum = 0;
  for (const ParameterState& kept : kept_)
    sum = crc32c(kept.outer.const_data_ptr(), kept.outer.nbytes(), sum);
  return sum;
}

void Fragment::each(const std::function<void(const OuterParameter&, const at::Tensor&)>& call) {
  for (const ParameterState& kept : kept_)
    call(kept.parameter, kept.outer);
}

}  // namespace lowcomm

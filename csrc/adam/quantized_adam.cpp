// A step:
//   1. Ranks compare what has to be equal, where it may have changed.
//   2. Each forms its message: gradients of parameters in their warm-up, updates of the others.
//   3. One all_reduce averages the gradients exactly, one the updates by their codes.
//   4. Where all of it is finite, moments and parameters take it; else nothing has changed.
#include "adam/quantized_adam.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/float_env.h"
#include "base/hashes.h"
#include "collective/all_reduce.h"
#include "collective/collectives.h"
#include "collective/op_context.h"
#include "collective/summer.h"
#include "kernels/finite.h"
#include "tensor/host_parameters.h"

namespace lowcomm {
namespace {

constexpr const char* kName = "QuantizedAdam";
const Reduction kAverage{ReduceKind::sum, /*average=*/true};

std::string text(const AdamRule& r) {
  return c10::str("lr=", r.lr, " betas=", r.beta1, ",", r.beta2, " eps=", r.eps, " weight_decay=", r.weight_decay);
}

int64_t firstNonFinite(const at::Tensor& x) {
  return lowcomm::firstNonFinite(x.const_data_ptr(), DType::float32, static_cast<uint64_t>(x.numel()),
                                 std::numeric_limits<float>::infinity());
}

}  // namespace

// The messages of one step; shared with its jobs, which may outlive the optimizer.
struct QuantizedAdam::Message {
  at::Tensor gradients;             // flat, fp32: of the parameters in their warm-up
  std::vector<at::Tensor> exact;    // by parameter, a part of it; undefined where coded
  std::vector<at::Tensor> updates;  // kept alive for `coded`
  std::vector<std::shared_ptr<Compression>> compressions;
  LowRankMessage coded;
  std::string mine;  // the first parameter whose own gradient is not finite; empty: none
  bool lent = false;

  void end(bool well) {
    for (const auto& compression : compressions)
      compression->end(well);
    lent = false;
  }
  ~Message() {
    if (lent) end(false);
  }
};

void QuantizedAdamOptions::check() const {
  if (codec.id == CodecId::none) throw ValueError("QuantizedAdam: codec: expected one that rounds, got 'none'");
  expectMessageCodec("QuantizedAdam", codec);
  if (warmup_steps < 1) {
    throw ValueError("QuantizedAdam: warmup_steps: expected 1 or more, for v to have a value, got " +
                     std::to_string(warmup_steps));
  }
  if (check_every < 0)
    throw ValueError("QuantizedAdam: check_every: expected 0 or more, got " + std::to_string(check_every));
}

QuantizedAdam::QuantizedAdam(std::shared_ptr<OpQueue> group, QuantizedAdamOptions options)
    : group_(std::move(group)), options_(std::move(options)) {
  options_.check();
}

void QuantizedAdam::add(std::vector<AdamParameter> parameters) {
  for (const AdamParameter& parameter : parameters) {
    if (!parameter.tensor.is_floating_point() || parameter.tensor.layout() != at::kStrided) {
      throw TypeError(c10::str("QuantizedAdam: ", parameter.name, ": expected a dense floating-point tensor, got ",
                               parameter.tensor.toString()));
    }
  }
  for (AdamParameter& parameter : parameters) {
    const at::IntArrayRef shape = parameter.tensor.sizes();
    ParameterState kept{std::move(parameter), static_cast<uint32_t>(kept_.size())};
    kept.momentum = at::zeros(shape, at::kFloat);
    kept.variance = at::zeros(shape, at::kFloat);
    if (kept.parameter.tensor.scalar_type() != at::kFloat) kept.rounding = at::zeros(shape, at::kFloat);
    kept.compression = std::make_shared<Compression>(shape, /*rank=*/0, /*feedback=*/true, /*eight_bits=*/false, 0);
    kept_.push_back(std::move(kept));
  }
  agreed_ = false;
}

bool QuantizedAdam::step(const std::vector<at::Tensor>& gradients, const std::vector<AdamRule>& rules, float scale,
                         bool skip, const Settle& settle) {
  const c10::NoGradGuard no_grad;
  if (gradients.size() != kept_.size()) {
    throw ValueError(c10::str("QuantizedAdam: step: expected a gradient for each of ", kept_.size(),
                              " parameters, got ", gradients.size()));
  }
  for (size_t i = 0; i < kept_.size(); ++i) {
    const at::Tensor& g = gradients[i];
    if (g.defined() && (g.layout() != at::kStrided || g.sizes() != kept_[i].momentum.sizes())) {
      throw ValueError(c10::str("QuantizedAdam: step: ", kept_[i].parameter.name,
                                ": expected a dense gradient of shape ", kept_[i].momentum.sizes(), ", got ",
                                g.toString(), " of shape ", g.sizes()));
    }
  }
  if (!agreed_ || (options_.check_every > 0 && steps_ >= options_.check_every)) agree(rules);

  const std::shared_ptr<Message> message = form(gradients, rules, scale);
  average(message);
  std::string spoilt = notFinite(*message);
  try {
    if (settle) spoilt = settle(spoilt);
  } catch (...) {
    message->end(false);
    throw;
  }
  message->end(spoilt.empty());
  ++steps_;
  if (!spoilt.empty()) {
    if (skip) return false;
    throw ValueError("QuantizedAdam: expected finite gradients, got NaN, infinity or what the codec cannot hold in " +
                     spoilt + "; the step was dropped on all ranks");
  }
  apply(*message, rules);
  return true;
}

// 1.
void QuantizedAdam::agree(const std::vector<AdamRule>& rules) {
  std::string groups;
  for (const AdamRule& rule : rules)
    groups += (groups.empty() ? "" : "; ") + text(rule);
  KeyValues mine{{{"options", c10::str("codec=", options_.codec.str(), " warmup_steps=", options_.warmup_steps,
                                       " check_every=", options_.check_every, " seed=", options_.seed)},
                  {"parameters", shapes()},
                  {"hyper-parameters", groups},
                  {"checksum of parameters and moments", std::to_string(checksum())}}};
  Ticket(*group_, kName, 1, [&](OpContext& op) { lowcomm::agree(op, mine); }).wait();
  agreed_ = true;
  steps_ = 0;
}

// 2.
std::shared_ptr<QuantizedAdam::Message> QuantizedAdam::form(const std::vector<at::Tensor>& gradients,
                                                            const std::vector<AdamRule>& rules, float scale) {
  auto message = std::make_shared<Message>();
  message->exact.resize(kept_.size());
  int64_t exact = 0, step = 0;
  for (const ParameterState& kept : kept_) {
    exact += kept.frozen(options_) ? 0 : kept.momentum.numel();
    step = std::max(step, kept.steps);
  }
  const CodecSpec codec = poisoning(options_.codec);
  const Draws draws{options_.seed, streamOf(group_->rank(), 0), static_cast<uint32_t>(step)};
  message->coded = {DType::float32, codec, codec, draws, {}};
  message->gradients = at::empty({exact}, at::kFloat);
  std::vector<at::Tensor> given;
  for (const at::Tensor& gradient : gradients)
    given.push_back(gradient.defined() ? gradient : at::empty({0}, at::kFloat));
  const HostParameters hosts(std::move(given));

  const FloatEnv env;
  int64_t at = 0;
  for (size_t i = 0; i < kept_.size(); ++i) {
    ParameterState& kept = kept_[i];
    at::Tensor gradient = gradients[i].defined() ? hosts.wide(i) : at::zeros_like(kept.momentum);
    if (scale != 1) gradient = gradient * scale;
    if (message->mine.empty() && firstNonFinite(gradient) >= 0) message->mine = kept.parameter.name;
    const int64_t numel = gradient.numel();
    if (!kept.frozen(options_)) {
      message->exact[i] = message->gradients.narrow(0, at, numel).view(gradient.sizes());
      message->exact[i].copy_(gradient);
      at += numel;
      continue;
    }
    if (!kept.message.defined()) kept.message = at::empty_like(kept.momentum);
    AdamSpan span = kept.span();
    span.gradient = gradient.const_data_ptr<float>();
    formUpdate(span, rules[kept.parameter.group], scaleOf(kept, rules[kept.parameter.group]));
    LowRankTensor tensor{kept.message.mutable_data_ptr<float>(), static_cast<uint64_t>(numel)};
    const Compression::StateView lent = kept.compression->begin(numel);
    message->lent = true;
    tensor.residual = lent.residual;
    tensor.kept = lent.kept;
    tensor.slot = kept.number * 2 * static_cast<uint64_t>(group_->size());
    tensor.first_owner = kept.number;
    message->coded.tensors.push_back(tensor);
    message->updates.push_back(kept.message);
    message->compressions.push_back(kept.compression);
  }
  return message;
}

// 3.
void QuantizedAdam::average(const std::shared_ptr<Message>& message) {
  Ticket exact, coded;
  if (message->gradients.numel() > 0) {
    exact = Ticket(*group_, "quantized_adam_warmup", 1, [message](OpContext& op) {
      op.counters.exact = true;
      allReduce(op,
                {{static_cast<uint64_t>(message->gradients.numel()), CodecSpec{}, DType::float32,
                  message->gradients.mutable_data_ptr<float>()}},
                kAverage);
    });
  }
  if (!message->coded.tensors.empty()) {
    coded = Ticket(*group_, "quantized_adam", 1,
                   [message](OpContext& op) { lowRankAllReduce(op, message->coded, kAverage); });
  }
  moved_ = {};
  std::exception_ptr error;
  for (Ticket* ticket : {&exact, &coded}) {  // both: an op that is under way reads and writes the message
    if (!ticket->pending()) continue;
    try {
      const OpCounters moved = ticket->wait();
      moved_.raw_bytes += moved.raw_bytes;
      moved_.wire_bytes += moved.wire_bytes;
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) {
    message->end(false);
    std::rethrow_exception(error);
  }
}

// Names a parameter and a rank of which the averages, which all ranks see, are not finite; empty if all are.
std::string QuantizedAdam::notFinite(const Message& message) const {
  for (size_t i = 0; i < kept_.size(); ++i) {
    const at::Tensor& average = message.exact[i].defined() ? message.exact[i] : kept_[i].message;
    if (firstNonFinite(average) < 0) continue;
    const bool here = !message.mine.empty();
    return (here ? message.mine : kept_[i].parameter.name) + (here ? " on this rank" : " on another rank");
  }
  return "";
}

// 4.
void QuantizedAdam::apply(const Message& message, const std::vector<AdamRule>& rules) {
  std::vector<at::Tensor> parameters;
  for (const ParameterState& kept : kept_)
    parameters.push_back(kept.parameter.tensor);
  HostParameters hosts(std::move(parameters));
  const FloatEnv env;
  for (size_t i = 0; i < kept_.size(); ++i) {
    ParameterState& kept = kept_[i];
    const AdamRule& rule = rules[kept.parameter.group];
    at::Tensor host = hosts.wide(i);
    AdamSpan span = kept.span();
    span.parameter = host.mutable_data_ptr<float>();
    ++kept.steps;
    if (message.exact[i].defined()) {
      span.gradient = message.exact[i].const_data_ptr<float>();
      kept.variance_steps = kept.steps;
      kept.least = -1;
      stepAdam(span, rule, kept.steps);
    } else {
      stepFrozen(span, rule, scaleOf(kept, rule), kept.steps);
      kept.compression->commit();
    }
    if (kept.rounding.defined()) kept.rounding.copy_(host);
    hosts.round(i, host);
    if (kept.rounding.defined()) kept.rounding.sub_(hosts.wide(i));
    kept.parameter.tensor.unsafeGetTensorImpl()->bump_version();  // autograd names a backward that comes too late
  }
  hosts.store();
}

AdamSpan QuantizedAdam::ParameterState::span() const {
  const auto on = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
  };
  return {
      nullptr, on(rounding), nullptr, on(momentum), on(variance), on(message), static_cast<size_t>(momentum.numel())};
}

AdamScale QuantizedAdam::scaleOf(ParameterState& kept, const AdamRule& rule) const {
  if (kept.least < 0) {
    kept.least =
        leastVariance(kept.variance.const_data_ptr<float>(), static_cast<size_t>(kept.variance.numel()), rule.beta2);
  }
  return {kept.variance_steps, kept.least};
}

std::string QuantizedAdam::shapes() const {
  std::string text;
  for (const ParameterState& kept : kept_) {
    text += c10::str(kept.parameter.name, " ", kept.parameter.tensor.scalar_type(), " ", kept.momentum.sizes(),
                     " group ", kept.parameter.group, " step ", kept.steps, " ", kept.variance_steps, "\n");
  }
  return c10::str(kept_.size(), ", at step ", kept_.empty() ? 0 : kept_[0].steps, ", hash ", fnv1a(text));
}

uint32_t QuantizedAdam::checksum() const {
  std::vector<at::Tensor> parameters;
  for (const ParameterState& kept : kept_)
    parameters.push_back(kept.parameter.tensor);
  const HostParameters hosts(std::move(parameters));
  uint32_t sum = 0;
  for (size_t i = 0; i < kept_.size(); ++i) {
    for (const at::Tensor& tensor : {hosts.wide(i), kept_[i].momentum, kept_[i].variance, kept_[i].rounding}) {
      if (tensor.defined()) sum = crc32c(tensor.const_data_ptr(), tensor.nbytes(), sum);
    }
  }
  return sum;
}

}  // namespace lowcomm

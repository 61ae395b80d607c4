#include "diloco/outer_message.h"

#include <c10/core/GradMode.h>

#include <exception>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/float_env.h"
#include "collective/op_context.h"
#include "collective/summer.h"
#include "kernels/finite.h"
#include "tensor/gather_values.h"
#include "tensor/host_parameters.h"

namespace lowcomm {
namespace {

const Reduction kAverage{ReduceKind::sum, /*average=*/true};

// out = (a − b)·share, without b: a·share. Not inlined: FloatEnv's register must be set before the arithmetic.
__attribute__((noinline)) void make(float* out, const float* a, const float* b, float share, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i)
    out[i] = b ? a[i] - b[i] : a[i];
  if (share == 1) return;
  for (uint64_t i = 0; i < count; ++i)
    out[i] *= share;
}

bool isFinite(const at::Tensor& tensor) {
  return firstNonFinite(tensor.const_data_ptr(), DType::float32, static_cast<uint64_t>(tensor.numel()),
                        std::numeric_limits<float>::infinity()) < 0;
}

// f(part) of its elements, in parts.
template <class F>
void eachPart(const at::Tensor& tensor, F&& f) {
  for (const at::Tensor& part : tensor.view({-1}).split(kMostElements))
    f(part);
}

}  // namespace

ReduceTensor OuterMessage::inPlace(const at::Tensor& message) {
  in_place_.push_back(message);
  return {static_cast<uint64_t>(message.numel()), message.mutable_data_ptr<float>()};
}

Elsewhere OuterMessage::from(const at::Tensor& x) {
  if (weight > 0) return difference(x, {});
  read_.push_back(x);
  return {.from = x.const_data_ptr<float>()};
}

Elsewhere OuterMessage::difference(const at::Tensor& a, const at::Tensor& b) {
  read_.push_back(a);
  read_.push_back(b);
  const float *x = a.const_data_ptr<float>(), *y = b.defined() ? b.const_data_ptr<float>() : nullptr;
  makers_.emplace_back([this, x, y](float* out, uint64_t first, uint64_t count) {
    const FloatEnv env;
    make(out, x + first, y ? y + first : nullptr, share_, count);
  });
  return {.make = &makers_.back()};
}

// Weights are compared here, behind training: a site that is late would hold the others up otherwise.
void OuterMessage::weigh(OpContext& op) {
  double sum = 0;
  for (const std::vector<double>& one : gatherNumbers({weight}, op))
    sum += one[0];
  ++op.sequence;
  share_ = static_cast<float>(weight * op.size() / sum);
  if (device_) {
    device_->run([&] {
      for (const at::Tensor& tensor : in_place_)
        tensor.mul_(share_);
    });
    return;
  }
  const FloatEnv env;
  for (const at::Tensor& tensor : in_place_) {
    float* x = tensor.mutable_data_ptr<float>();
    for (int64_t i = 0; i < tensor.numel(); ++i)
      x[i] *= share_;
  }
}

void OuterMessage::run(OpContext& op) {
  for (const auto& compression : compressions)
    compression->settle();
  if (device_) return runOnDevice(op);
  if (weight > 0) weigh(op);
  op.counters.exact = !exact.empty();
  if (!exact.empty()) {
    allReduce(op, exact, kAverage);
  } else {
    finite = lowRankAllReduce(op, coded, kAverage);
  }
}

void OuterMessage::place(const DeviceQueue& queue) {
  device_ = queue;
  issued_ = device_->reached();
}

void OuterMessage::runOnDevice(OpContext& op) {
  const c10::NoGradGuard no_grad;
  DeviceQueue::occupy(device_->device());
  device_->follow(issued_);
  std::exception_ptr error;
  try {
    if (weight > 0) weigh(op);
    exact.empty() ? reduceCodes(op) : reduceValues(op);
    device_->run([&] {
      at::Tensor all = at::ones({}, in_place_[0].options().dtype(at::kBool));
      for (const at::Tensor& tensor : in_place_)
        eachPart(tensor, [&](const at::Tensor& part) { all.logical_and_(part.isfinite().all()); });
      finite = all.item<bool>();
    });
  } catch (...) {
    error = std::current_exception();
  }
  // After a failure too: the caller's stream does not wait for this one, and takes up the tensors again.
  DeviceQueue::block(device_->mark());
  if (error) std::rethrow_exception(error);
}

// Exact elements are all that there is to send: through pinned memory.
void OuterMessage::reduceValues(OpContext& op) {
  op.counters.exact = true;
  std::optional<HostParameters> hosts;
  device_->run([&] { hosts.emplace(in_place_); });
  for (size_t i = 0; i < in_place_.size(); ++i) {
    exact[i].tensors[0].data = hosts->host(i).mutable_data_ptr();
    op.counters.device_to_host_bytes += in_place_[i].nbytes();
    op.counters.host_to_device_bytes += in_place_[i].nbytes();
  }
  allReduce(op, exact, kAverage);
  device_->run([&] { hosts->store(); });
}

// A tensor that is all 0 contributes nothing, and its residual waits: as lowRankAllReduce has it.
void OuterMessage::reduceCodes(OpContext& op) {
  AllReduceMessage message(coded.codec, DType::float32, coded.draws);
  std::vector<at::Tensor> zeros;
  std::vector<std::pair<at::Tensor, at::Tensor>> waiting;  // a residual to be, and what it was
  device_->run([&] {
    std::vector<at::Tensor> any;
    for (const at::Tensor& tensor : in_place_) {
      any.push_back(at::zeros({}, tensor.options().dtype(at::kBool)));
      // Compares bits, as on the host: −0 is not zero.
      eachPart(tensor, [&](const at::Tensor& part) { any.back().logical_or_(part.view(at::kInt).ne(0).any()); });
    }
    const at::Tensor moved = at::stack(any).cpu();
    for (size_t i = 0; i < coded.tensors.size(); ++i) {
      const LowRankTensor& t = coded.tensors[i];
      const float* kept = t.kept;
      if (t.residual) {
        const auto at = [&](const float* x) {
          return at::for_blob(const_cast<float*>(x), {static_cast<int64_t>(t.elements)})
              .options(in_place_[i].options())
              .target_device(device_->device())
              .make_tensor();
        };
        if (!moved.const_data_ptr<bool>()[i]) {
          zeros.push_back(at::zeros({static_cast<int64_t>(t.elements)}, in_place_[i].options()));
          waiting.emplace_back(at(t.residual), at(t.kept));
          kept = zeros.back().const_data_ptr<float>();
        }
        if (op.size() == 1) {
          in_place_[i].view({-1}).add_(at(kept));
          at(t.residual).zero_();
        }
      }
      message.tensors.push_back({t.elements, t.data, t.residual, t.slot, t.first_owner, {}, kept});
    }
  });
  if (op.size() > 1) {
    std::string because;
    DeviceCodec device_codec(std::make_unique<DeviceCodecQueue>(*device_), codecKernels(*device_, because),
                             op.group.chunk_bytes);
    allReduce(op, {message}, kAverage, &device_codec);
    op.counters.device_to_host_bytes += device_codec.hostBytes();
    op.counters.host_to_device_bytes += device_codec.deviceBytes();
  }
  device_->run([&] {
    for (const auto& [residual, before] : waiting)
      residual.add_(before);
  });
}

void expectPlace(const std::vector<OuterParameter>& parameters, const CodecSpec& codec) {
  const std::string what = "DiLoCoX: outer_place: expected ";
  const c10::Device first = parameters[0].tensor.device();
  for (const auto& [name, tensor, whole, offset, number] : parameters) {
    if (tensor.device() == first && (first.is_cpu() || first.is_cuda())) continue;
    throw ValueError(what + "parameters on the CPU or on one CUDA device, got " + parameters[0].name + " on " +
                     first.str() + ", " + name + " on " + tensor.device().str());
  }
  if (first.is_cpu() || codec.id == CodecId::none) return;
  std::string because;
  const auto kernels = codecKernels(DeviceQueue(first), because);
  if (kernels && !kernels->takes(poisoning(codec), DType::float32)) because = "none for " + codec.str();
  if (!because.empty()) throw ValueError(what + "kernels for the codec on " + first.str() + ", got " + because);
}

bool OuterMessage::inPlaceIsFinite() const {
  if (device_) return finite;
  for (const at::Tensor& tensor : in_place_) {
    if (!isFinite(tensor)) return false;
  }
  return true;
}

}  // namespace lowcomm

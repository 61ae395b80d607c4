// Tensors of the fake device, and their operations: by the host's kernels on their memory.
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <utility>

#include "fake_device.h"
#include "late_streams.h"

namespace lowcomm::fake_device {
namespace {

std::string here(c10::DeviceIndex index) {
  return named(streamOf(index));
}

struct FakeMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes > 0 ? c10::GetCPUAllocator()->raw_allocate(bytes) : nullptr;
    if (bytes > 0) std::memset(memory, kNever, bytes);
    return {memory, memory, [](void* p) { c10::GetCPUAllocator()->raw_deallocate(p); }, c10::Device(kType, current)};
  }
  void copy_data(void*, const void*, std::size_t) const override {}
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  static FakeMemory memory;
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   type.value_or(at::kFloat), format);
}

at::Tensor emptyStrided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                        std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  const at::ScalarType dtype = type.value_or(at::kFloat);
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, at::elementSize(dtype));
  const at::Tensor flat =
      empty(c10::SymIntArrayRef({c10::SymInt(bytes / at::elementSize(dtype))}), dtype, {}, {}, {}, {});
  return at::native::as_strided_tensorimpl(flat, sizes, strides, 0);
}

// The memory of a tensor of either kind as a host tensor.
at::Tensor memoryOf(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions(tensor.scalar_type()).device(at::kCPU));
}

// As CUDA's: a copy from pageable memory has read it when it returns, one to pageable memory has ended then.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const c10::DeviceIndex index = (to.is_cpu() ? from : to).device().index();
  tell(std::string("copy to ") + (to.is_cpu() ? "host" : "device") + " on " + here(index));
  if (from.is_cuda() && from.device().index() != index) lateStreams().synchronize(streamOf(from.device().index()));
  const bool waits = !non_blocking || (to.is_cpu() && !to.is_pinned());
  const bool reads_now = lateStreams().isLate() && from.is_cpu() && (waits || !from.is_pinned());
  lateStreams().enqueue(streamOf(index), [to = memoryOf(to), from = reads_now ? from.clone() : memoryOf(from),
                                          held = std::pair(to, from)]() mutable { to.copy_(from); });
  if (waits && to.is_cpu()) lateStreams().synchronize(streamOf(index));
  return to;
}

at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  std::vector<at::Tensor> parts, held;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(memoryOf(tensor));
    held.push_back(tensor);
  }
  const c10::DeviceIndex index = held[0].device().index();
  tell("cat on " + here(index));
  const at::Tensor out = at::empty(at::cat(parts, dim).sizes(), held[0].options());
  lateStreams().enqueue(streamOf(index), [parts, held, dim, out] { memoryOf(out).copy_(at::cat(parts, dim)); });
  return out;
}

void spread(at::TensorList to, at::TensorList from, bool) {
  const c10::DeviceIndex index = to[0].device().index();
  tell("spread on " + here(index));
  for (size_t i = 0; i < to.size(); ++i) {
    lateStreams().enqueue(streamOf(index), [to = memoryOf(to[i]), from = memoryOf(from[i]),
                                            held = std::pair(to[i], from[i])]() mutable { to.copy_(from); });
  }
}

// A tensor of the device whose memory is a host tensor's.
at::Tensor onDevice(const at::Tensor& host, c10::DeviceIndex index) {
  auto* held = new at::Tensor(host);
  at::DataPtr data(host.mutable_data_ptr(), held, [](void* p) { delete static_cast<at::Tensor*>(p); }, {kType, index});
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), host.nbytes(), std::move(data)),
      c10::DispatchKeySet(c10::DispatchKey::CUDA), host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  return tensor;
}

// An operation on tensors of the device, by the host's kernels on their memory.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : op_(op), arguments_(stack.end() - op.schema().arguments().size(), stack.end()) {
    for (c10::IValue& value : arguments_)
      value = onMemory(value);
  }

  c10::DeviceIndex index() const { return index_; }

  // Whether the shapes of its results are those of any values of its tensors.
  bool hasKnownShapes() const {
    static const std::set<std::string> asks{"aten::index",         "aten::index_put_", "aten::nonzero",
                                            "aten::masked_select", "aten::_unique2",   "aten::_index_put_impl_",
                                            "aten::unique_dim",    "aten::bincount",   "aten::repeat_interleave"};
    const auto& returns = op_.schema().returns();
    return !asks.count(op_.schema().name()) && std::all_of(returns.begin(), returns.end(), [](const auto& result) {
      return result.type()->kind() == c10::TypeKind::TensorType;
    });
  }

  // Runs it, and returns its results.
  torch::jit::Stack now() {
    torch::jit::Stack results = arguments_;
    op_.callBoxed(results);
    growTo(seen_);
    for (c10::IValue& result : results) {
      if (result.isTensor() && result.toTensor().defined()) result = resultOf(result.toTensor(), seen_);
    }
    return results;
  }

  // Its results, which `work` then makes.
  torch::jit::Stack later(std::function<void()>& work) {
    Seen zeros;
    torch::jit::Stack results = arguments_;
    for (const auto& [tensor, memory] : seen_)
      zeros.emplace_back(tensor, zerosLike(memory));
    for (c10::IValue& value : results)
      value = replaced(value, zeros);
    op_.callBoxed(results);
    growTo(zeros);
    std::vector<std::optional<at::Tensor>> made(results.size());  // memory of the results that are new
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results[i].isTensor() || !results[i].toTensor().defined()) continue;
      const at::Tensor result = resultOf(results[i].toTensor(), zeros);
      const bool is_new = std::none_of(seen_.begin(), seen_.end(), [&](const auto& one) {
        return one.first.is_same(result) || one.first.is_alias_of(result);
      });
      if (is_new) made[i] = memoryOf(result);
      results[i] = result;
    }
    std::vector<std::pair<at::Tensor, at::Tensor>> grown;  // what the operation grows, and the memory of what it grew
    for (size_t i = 0; i < seen_.size(); ++i) {
      if (seen_[i].second.numel() == 0 && zeros[i].second.numel() > 0)
        grown.emplace_back(seen_[i].second, memoryOf(seen_[i].first));
    }
    work = [op = op_, arguments = arguments_, held = seen_, results, made, grown] {
      torch::jit::Stack stack = arguments;
      op.callBoxed(stack);
      for (size_t i = 0; i < made.size(); ++i) {
        if (made[i]) at::Tensor(*made[i]).copy_(stack[i].toTensor());
      }
      for (const auto& [memory, whole] : grown)
        at::Tensor(whole).copy_(memory);
    };
    return results;
  }

 private:
  using Seen = std::vector<std::pair<at::Tensor, at::Tensor>>;  // a tensor of the device, and its memory

  c10::IValue onMemory(const c10::IValue& value) {
    const auto taken = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      index_ = tensor.device().index();
      const bool grows = tensor.numel() == 0;  // what an operation makes of nothing
      seen_.emplace_back(tensor, grows ? at::empty({0}, tensor.options().device(at::kCPU)) : memoryOf(tensor));
      return seen_.back().second;
    };
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (value.toDevice().has_index()) index_ = value.toDevice().index();
      return c10::Device(at::kCPU);
    }
    return mapped(value, taken);
  }

  // Memory of as many bytes as this tensor's, none of which is set.
  static at::Tensor zerosLike(const at::Tensor& memory) {
    const size_t bytes = at::detail::computeStorageNbytes(memory.sizes(), memory.strides(), memory.itemsize());
    return at::zeros({static_cast<int64_t>(bytes / memory.itemsize())}, memory.options())
        .as_strided(memory.sizes(), memory.strides(), 0);
  }

  c10::IValue replaced(const c10::IValue& value, const Seen& others) const {
    return mapped(value, [&](const at::Tensor& tensor) {
      for (size_t i = 0; i < seen_.size(); ++i) {
        if (tensor.defined() && tensor.is_same(seen_[i].second)) return others[i].second;
      }
      return tensor;
    });
  }

  static c10::IValue mapped(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& map) {
    if (value.isTensor()) return map(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector())
        all.push_back(map(tensor));
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        all.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
      return all;
    }
    return value;
  }

  // Gives tensors that the operation grew memory of their new size.
  void growTo(const Seen& after) const {
    for (const auto& [tensor, memory] : after) {
      if (tensor.numel() > 0 || memory.numel() == 0) continue;
      tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(onDevice(memory, index_).storage());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(memory.sizes(), memory.strides());
    }
  }

  // An argument, a view of one, or a new tensor.
  at::Tensor resultOf(const at::Tensor& made, const Seen& of) const {
    for (const auto& [tensor, memory] : of) {
      if (memory.is_same(made)) return tensor;
      if (memory.numel() > 0 && memory.is_alias_of(made)) {
        return tensor.as_strided(made.sizes(), made.strides(), tensor.storage_offset() + made.storage_offset());
      }
    }
    return onDevice(made, index_);
  }

  const c10::OperatorHandle op_;
  torch::jit::Stack arguments_;
  Seen seen_;
  c10::DeviceIndex index_ = current;
};

// Any other operation.
void onHostMemory(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostCall call(op, *stack);
  tell("run on " + here(call.index()));
  const c10::Stream stream = streamOf(call.index());
  torch::jit::Stack results;
  if (lateStreams().isLate() && call.hasKnownShapes()) {
    std::function<void()> work;
    results = call.later(work);
    lateStreams().enqueue(stream, std::move(work));
  } else {
    lateStreams().synchronize(stream);
    results = call.now();
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->insert(stack->end(), results.begin(), results.end());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&onHostMemory>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", emptyStrided);
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});  // memory that work still uses is kept
  m.impl("copy_", copy);
  m.impl("cat", cat);
  m.impl("_foreach_copy_", spread);
  m.impl("view", [](const at::Tensor& t, c10::SymIntArrayRef size) {
    return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("as_strided", [](const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                          std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
  });
}

}  // namespace
}  // namespace lowcomm::fake_device

#include "fake_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>

namespace lowcomm::fake_device {

std::vector<std::string> told;
thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kDevices> streams = {5, 6};
bool capturing = false;

namespace {

std::mutex mutex;  // of `told`, `opened` and `events`
std::set<c10::DeviceIndex> opened;
uintptr_t events = 0;

std::string event(void* handle) {
  return "e" + std::to_string(reinterpret_cast<uintptr_t>(handle));
}

void open(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(mutex);
  opened.insert(index);
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  FakeGuard() = default;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kType, current);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override {
    open(device.index());
    current = device.index();
  }
  // A guard that gives a device back where no context is open does not open one: c10 sees to that.
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    // A pool belongs to the current device in CUDA: asking under another one would hand out a stream of the wrong one.
    if (device.index() != current) throw std::logic_error("expected the pool of the current device to be asked");
    return c10::Stream(c10::Stream::UNSAFE, device, kPoolStream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  // Record and block go to the stream's device and back to the thread's, which opens a context on either.
  void record(void** handle, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*handle) {
      std::lock_guard<std::mutex> lock(mutex);
      *handle = reinterpret_cast<void*>(++events);
    }
    open(stream.device_index());
    open(current);
    tell("record " + event(*handle) + " on " + named(stream));
  }
  void block(void* handle, const c10::Stream& stream) const override {
    open(stream.device_index());
    open(current);
    tell("block " + named(stream) + " on " + event(handle));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void* handle) const override { tell("synchronize " + event(handle)); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

// Torch asks this allocator for pinned memory.
struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

std::string here(c10::DeviceIndex index) {
  return named(c10::Stream(c10::Stream::UNSAFE, {kType, index}, streams[index]));
}

struct FakeMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes > 0 ? c10::GetCPUAllocator()->raw_allocate(bytes) : nullptr;
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

// The memory of a tensor of either kind as a host tensor.
at::Tensor memoryOf(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions(tensor.scalar_type()).device(at::kCPU));
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool) {
  const at::Tensor& on = to.is_cpu() ? from : to;
  tell(std::string("copy to ") + (to.is_cpu() ? "host" : "device") + " on " + here(on.device().index()));
  memoryOf(to).copy_(memoryOf(from));
  return to;
}

at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors)
    parts.push_back(memoryOf(tensor));
  const at::Tensor& first = *tensors.begin();
  tell("cat on " + here(first.device().index()));
  const at::Tensor all = at::cat(parts, dim);
  at::Tensor out = at::empty(all.sizes(), first.options());
  memoryOf(out).copy_(all);
  return out;
}

void spread(at::TensorList to, at::TensorList from, bool) {
  tell("spread on " + here(to[0].device().index()));
  for (size_t i = 0; i < to.size(); ++i)
    memoryOf(to[i]).copy_(memoryOf(from[i]));
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

// Any other operation, by the host's kernels on the memory of its tensors.
void onHostMemory(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::DeviceIndex index = current;
  std::vector<std::pair<at::Tensor, at::Tensor>> seen;  // a tensor of the device, and its memory
  const auto taken = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    index = tensor.device().index();
    const bool grows = tensor.numel() == 0;  // what an operation makes of nothing
    seen.emplace_back(tensor, grows ? at::empty({0}, tensor.options().device(at::kCPU)) : memoryOf(tensor));
    return seen.back().second;
  };
  const size_t arguments = op.schema().arguments().size(), results = op.schema().returns().size();
  for (size_t i = stack->size() - arguments; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = taken(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector())
        all.push_back(taken(tensor));
      value = all;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      index = value.toDevice().index();
      value = c10::Device(at::kCPU);
    }
  }
  tell("run on " + here(index));
  op.callBoxed(stack);
  for (const auto& [tensor, memory] : seen) {
    if (tensor.numel() > 0 || memory.numel() == 0) continue;
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(onDevice(memory, index).storage());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(memory.sizes(), memory.strides());
  }
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor made = value.toTensor();
    const auto same = std::find_if(seen.begin(), seen.end(), [&](const auto& one) { return one.second.is_same(made); });
    value = same == seen.end() ? onDevice(made, index) : same->first;
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&onHostMemory>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
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

void tell(std::string order) {
  std::lock_guard<std::mutex> lock(mutex);
  told.push_back(std::move(order));
}

std::set<c10::DeviceIndex> contexts() {
  std::lock_guard<std::mutex> lock(mutex);
  return opened;
}

std::string named(const c10::Stream& stream) {
  return std::to_string(stream.device_index()) + ":" + std::to_string(stream.id());
}

at::Tensor onDevice(std::vector<float> elements, c10::DeviceIndex index) {
  auto* held = new std::vector<float>(std::move(elements));
  at::DataPtr data(held->data(), held, [](void* p) { delete static_cast<std::vector<float>*>(p); }, {kType, index});
  c10::Storage storage(c10::Storage::use_byte_size_t(), held->size() * sizeof(float), std::move(data));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(held->size())});
  return tensor;
}

std::vector<float> elementsOf(const at::Tensor& tensor) {
  const auto* x = static_cast<const float*>(tensor.const_data_ptr());
  return {x, x + tensor.numel()};
}

void reset() {
  std::lock_guard<std::mutex> lock(mutex);
  told.clear();
  opened.clear();
  current = 0;
  streams = {5, 6};
  events = 0;
  capturing = false;
}

}  // namespace lowcomm::fake_device

namespace at {
using lowcomm::fake_device::FakeHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)  // by the name that torch looks for
}  // namespace at

// For Python, which loads this file as a library: what was told, a line an order, until the next call.
extern "C" const char* fakeDeviceTold() {
  static std::string text;
  text.clear();
  for (const std::string& order : lowcomm::fake_device::told)
    text += order + "\n";
  return text.c_str();
}

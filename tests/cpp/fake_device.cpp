#include "fake_device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "late_streams.h"

namespace lowcomm::fake_device {

std::vector<std::string> told;
thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kDevices> streams = {5, 6};
bool capturing = false;

namespace {

std::mutex mutex;  // of `told`, `opened`, `events` and streams
std::set<c10::DeviceIndex> opened;
uintptr_t events = 0;
c10::StreamId new_streams = 0;
std::array<c10::StreamId, kDevices> pool_streams{};

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
    std::lock_guard<std::mutex> lock(mutex);
    return c10::Stream(c10::Stream::UNSAFE, device, kPoolStream + pool_streams[device.index()]++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    if (!device.has_index()) device.set_index(current);
    std::lock_guard<std::mutex> lock(mutex);
    return c10::Stream(c10::Stream::UNSAFE, device, kFirstNewStream + new_streams++);
  }
  bool queryStream(const c10::Stream& stream) const override {
    lateStreams().synchronize(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    tell("synchronize " + named(stream));
    lateStreams().synchronize(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    tell("synchronize device " + std::to_string(index));
    lateStreams().synchronizeAll();
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
    lateStreams().record(*handle, stream);
  }
  void block(void* handle, const c10::Stream& stream) const override {
    open(stream.device_index());
    open(current);
    tell("block " + named(stream) + " on " + event(handle));
    lateStreams().block(handle, stream);
  }
  bool queryEvent(void* handle) const override {
    lateStreams().synchronize(handle);
    return true;
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void* handle) const override {
    tell("synchronize " + event(handle));
    lateStreams().synchronize(handle);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& stream) const override {
    tell("keep for " + named(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

// DistributedDataParallel wants one of each kind of device.
struct FakeTimer final : c10d::Timer {
  explicit FakeTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return {}; }
};

// Pinned memory: the host's, and which it is.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = c10::GetCPUAllocator()->allocate(bytes);
    void* memory = data.get();
    if (bytes == 0) return data;
    std::lock_guard<std::mutex> lock(mutex);
    ends[memory] = static_cast<char*>(memory) + bytes;
    return {memory, data.release_context(), [](void* context) { forget(context); }, c10::Device(at::kCPU)};
  }
  static void forget(void* memory) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      ends.erase(memory);
    }
    c10::GetCPUAllocator()->raw_deallocate(memory);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool has(const void* data) const {
    std::lock_guard<std::mutex> lock(mutex);
    const auto next = ends.upper_bound(data);
    return next != ends.begin() && data < std::prev(next)->second;
  }
  static inline std::map<const void*, const void*> ends;  // of each piece
};
PinnedMemory pinned;

// What torch asks an accelerator for: its devices, and pinned memory.
struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { FakeGuard().setDevice({kType, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return FakeGuard().exchangeDevice({kType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override { return pinned.has(data); }
};

}  // namespace

c10::Stream streamOf(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, {kType, index}, streams[index]);
}

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
  new_streams = 0;
  pool_streams = {};
  capturing = false;
}

}  // namespace lowcomm::fake_device

namespace c10d {
using lowcomm::fake_device::FakeTimer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeTimer)
}  // namespace c10d

namespace at {
using lowcomm::fake_device::FakeHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)  // by the name that torch looks for
}  // namespace at

// For Python, which loads this file as a library. What was told, a line an order, until the next call:
extern "C" void fakeDeviceIsLate() {
  lowcomm::fake_device::lateStreams().setLate(true);
}

extern "C" const char* fakeDeviceTold() {
  static std::string text;
  text.clear();
  for (const std::string& order : lowcomm::fake_device::told)
    text += order + "\n";
  return text.c_str();
}

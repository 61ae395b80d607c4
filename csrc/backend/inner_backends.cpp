#include "backend/inner_backends.h"

#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "tensor/python_state.h"

namespace lowcomm {

InnerBackends::InnerBackends(Group& group, StorePtr store, InnerMakers make)
    : group_(group), store_(std::move(store)), make_(std::move(make)) {}

StorePtr InnerBackends::keys(const char* prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
}

void InnerBackends::openHost() {
  host_ = make_.gloo(keys("host"), group_.rank, group_.size, group_.options, std::nullopt);
}

void InnerBackends::close() {
  host_.reset();
  store_.reset();
  BackendPtr device;  // goes after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  asked_ = true;
  device.swap(device_);
}

BackendPtr InnerBackends::device() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (asked_) return device_;
  }
  // Without the lock: the maker takes the interpreter's, which the thread that asks for this one may hold.
  BackendPtr made;
  if (group_.settings().nccl != false) {
    NoPythonObjects guard;
    made = make_.nccl(keys("device"), group_.rank, group_.size, group_.options);
    if (made && !group_.uid().empty()) made->setGroupUid(group_.uid());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!asked_) device_ = made;  // else another thread was faster, and its own may be in use
  asked_ = true;
  return device_;
}

BackendPtr InnerBackends::deviceIfMade() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return device_;
}

BackendPtr InnerBackends::of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return host_;
  return deviceOrHost();
}

BackendPtr InnerBackends::deviceOrHost() {
  BackendPtr device = this->device();
  return device ? device : host_;
}

}  // namespace lowcomm

#include "backend/inner_backends.h"

#include <utility>

#include "tensor/python_state.h"

namespace lowcomm {

InnerBackends::InnerBackends(Group& group, StorePtr store, MakeInner make)
    : group_(group), store_(std::move(store)), make_(std::move(make)) {}

void InnerBackends::openHost() {
  host_ = make_(Role::host, store_, group_.rank, group_.size, group_.options, 1);
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
    made = make_(Role::device, store_, group_.rank, group_.size, group_.options, 1);
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

#pragma once

#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/group.h"

namespace lowcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// What an inner backend is made for.
enum class Role { host, device, lane };

// Makes an inner backend: Role::host a full ProcessGroupGloo, Role::device a ProcessGroupNCCL or null where there is
// none, Role::lane a ProcessGroupGloo with `connections` of its own to every peer for lowcomm's frames. `options` are
// the group's: time-out, name, global ranks.
using MakeInner = std::function<BackendPtr(Role, const StorePtr&, int rank, int size,
                                           const c10::intrusive_ptr<Options>& options, int connections)>;

// The backends that serve the ops which lowcomm does not: one for host tensors, gloo, and one for CUDA tensors, NCCL,
// where there is one. Thread-safe, but openHost() and close().
class InnerBackends {
 public:
  // `group` outlives this.
  InnerBackends(Group& group, StorePtr store, MakeInner make);

  // Collective: gloo connects all ranks.
  void openHost();

  // Lets go of both.
  void close();

  const BackendPtr& host() const { return host_; }

  // The backend of CUDA tensors, or null where there is none. Made when the first of them comes, on each rank by
  // itself: its constructor talks to nobody, and a process that has none must not wake the CUDA driver, nor end with
  // its threads.
  BackendPtr device();

  // The same, null also where nobody has needed it yet.
  BackendPtr deviceIfMade() const;

  // The backend of a tensor's device.
  BackendPtr of(const at::Tensor& tensor);

  // That of CUDA tensors where there is one, else the host's.
  BackendPtr deviceOrHost();

 private:
  Group& group_;
  StorePtr store_;
  const MakeInner make_;
  BackendPtr host_;
  mutable std::mutex mutex_;
  bool asked_ = false;  // whether `device_` is what there is
  BackendPtr device_;   // null: there is none, or nobody has needed it yet
};

}  // namespace lowcomm

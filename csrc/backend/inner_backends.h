#pragma once

#include <functional>
#include <mutex>

#include "backend/gloo_transport.h"
#include "backend/group.h"

namespace lowcomm {

// Makes a ProcessGroupNCCL, or null where this torch or machine has none. `options` are the group's: time-out, name,
// global ranks.
using MakeNccl =
    std::function<BackendPtr(const StorePtr&, int rank, int size, const c10::intrusive_ptr<Options>& options)>;

// How process groups of torch's are made; Python gives both.
struct InnerMakers {
  MakeGloo gloo;
  MakeNccl nccl;
};

// The backends that serve the ops which lowcomm does not: one for host tensors, gloo, and one for CUDA tensors, NCCL,
// where there is one. Thread-safe, but openHost() and close().
class InnerBackends {
 public:
  // `group` outlives this.
  InnerBackends(Group& group, StorePtr store, InnerMakers make);

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
  StorePtr keys(const char* prefix) const;  // the store, for one backend

  Group& group_;
  StorePtr store_;
  const InnerMakers make_;
  BackendPtr host_;
  mutable std::mutex mutex_;
  bool asked_ = false;  // whether `device_` is what there is
  BackendPtr device_;   // null: there is none, or nobody has needed it yet
};

}  // namespace lowcomm

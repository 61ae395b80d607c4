#pragma once

#include <array>
#include <list>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport/transport.h"

namespace lowcomm {

// Bytes by point-to-point ops of two inner backends, one a lane, each with connections of its own (ProcessGroupGloo).
//
// Gloo has no real cancel: cancel() breaks the waits and drops the lane's backend, which closes its connections. A wait
// that times out costs gloo the whole lane as well, so the caller gives the lane up after any TransportError.
class C10dTransport : public Transport {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  C10dTransport(BackendPtr control, BackendPtr bulk);
  ~C10dTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) override;
  std::unique_ptr<Transfer> irecv(Lane lane, int peer, uint32_t tag, std::span<std::byte> data) override;
  void cancel(Lane lane) override;

  // The works under way of one lane, so that cancel() can break their waits. Shared with the transfers.
  struct LaneState {
    std::mutex mutex;
    BackendPtr backend;  // null once cancelled
    std::list<c10::intrusive_ptr<c10d::Work>> works;
  };

 private:
  std::unique_ptr<Transfer> start(Lane lane, int peer, uint32_t tag, void* data, size_t bytes, bool send);

  const int rank_, size_;
  std::array<std::shared_ptr<LaneState>, kLanes> lanes_;
};

}  // namespace lowcomm

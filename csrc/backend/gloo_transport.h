#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "backend/options.h"
#include "transport/transport.h"

namespace lowcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// torch's store as a Rendezvous.
class StoreRendezvous final : public Rendezvous {
 public:
  explicit StoreRendezvous(StorePtr store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override;
  void wait(const std::string& key, std::chrono::milliseconds timeout) override;
  std::string get(const std::string& key) override;

  const StorePtr& store() const { return store_; }

 private:
  const StorePtr store_;
};

// Makes a ProcessGroupGloo, which only Python can: torch's packages are without gloo's headers. With `connections` it
// has that many to every peer, each with a thread, and only sends and receives. `options` are the group's: time-out,
// name, global ranks.
using MakeGloo = std::function<BackendPtr(const StorePtr&, int rank, int size,
                                          const c10::intrusive_ptr<Options>& options, std::optional<int> connections)>;

// Bytes by point-to-point ops of two inner backends, one a lane, each with connections of its own (ProcessGroupGloo).
//
// Gloo has no real cancel: cancel() breaks the waits and drops the lane's backend, which closes its connections. A wait
// that times out costs gloo the whole lane as well, so the caller gives the lane up after any TransportError; it cannot
// cancel single messages. A tag picks the connection: the tag modulo their number. Gloo ends the process over a message
// that is longer than its buffer.
class GlooTransport : public Transport {
 public:
  GlooTransport(BackendPtr control, BackendPtr bulk);
  ~GlooTransport() override;

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

// Connects the ranks of a group: a control lane with one connection to every peer, and a bulk lane with `connections`.
// Returns once all ranks have called it. The rendezvous is torch's store, of which gloo uses more than a Rendezvous
// has.
std::unique_ptr<Transport> connectGloo(const StoreRendezvous& rendezvous, int rank, int size,
                                       const c10::intrusive_ptr<Options>& options, int connections,
                                       const MakeGloo& make);

}  // namespace lowcomm

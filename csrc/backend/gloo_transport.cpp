#include "backend/gloo_transport.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <vector>

#include "base/signals.h"
#include "tensor/python_state.h"

namespace lowcomm {

namespace {

using Kind = TransportError::Kind;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Gloo tells a time-out from a closed connection by its text alone.
Kind kindOf(const std::string& what) {
  return what.find("Timed out") != std::string::npos ? Kind::timed_out : Kind::closed;
}

std::string firstLine(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// Only the lane's list holds the Work: gloo keeps a connection open as long as any Work of it lives, so cancel() must
// be able to drop them all, even if a transfer is still held elsewhere.
class GlooTransfer : public Transfer {
 public:
  GlooTransfer(std::shared_ptr<GlooTransport::LaneState> lane, std::list<WorkPtr>::iterator work, int peer)
      : lane_(std::move(lane)), at_(work), peer_(peer) {}

  ~GlooTransfer() override {
    WorkPtr dropped;
    std::lock_guard<std::mutex> lock(lane_->mutex);
    if (!lane_->backend) return;
    dropped = std::move(*at_);
    lane_->works.erase(at_);
  }

  void wait(std::chrono::milliseconds deadline) override {
    WorkPtr work;
    {
      std::lock_guard<std::mutex> lock(lane_->mutex);
      if (!lane_->backend) throw TransportError(Kind::cancelled, peer_, "the lane was cancelled");
      work = *at_;
    }
    bool whole = false;
    std::string why;
    try {
      whole = work->wait(deadline);
    } catch (const c10::Error& error) {
      why = firstLine(error.what_without_backtrace());
    } catch (const std::exception& error) {
      why = firstLine(error.what());
    }
    if (whole) return;
    {
      std::lock_guard<std::mutex> lock(lane_->mutex);
      if (!lane_->backend) throw TransportError(Kind::cancelled, peer_, "the lane was cancelled");
    }
    if (why.empty()) why = "the transfer was aborted";
    throw TransportError(kindOf(why), peer_, why);
  }

 private:
  std::shared_ptr<GlooTransport::LaneState> lane_;
  std::list<WorkPtr>::iterator at_;
  int peer_;
};

}  // namespace

GlooTransport::GlooTransport(BackendPtr control, BackendPtr bulk) : rank_(bulk->getRank()), size_(bulk->getSize()) {
  for (auto& lane : lanes_)
    lane = std::make_shared<LaneState>();
  lanes_[static_cast<int>(Lane::control)]->backend = std::move(control);
  lanes_[static_cast<int>(Lane::bulk)]->backend = std::move(bulk);
}

GlooTransport::~GlooTransport() {
  cancel(Lane::control);
  cancel(Lane::bulk);
}

std::unique_ptr<Transfer> GlooTransport::isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) {
  return start(lane, peer, tag, const_cast<std::byte*>(data.data()), data.size(), true);
}

std::unique_ptr<Transfer> GlooTransport::irecv(Lane lane, int peer, uint32_t tag, std::span<std::byte> data) {
  return start(lane, peer, tag, data.data(), data.size(), false);
}

std::unique_ptr<Transfer> GlooTransport::start(Lane lane, int peer, uint32_t tag, void* data, size_t bytes, bool send) {
  if (tag > INT_MAX) throw std::logic_error("gloo transport: expected a tag below 2^31, got " + std::to_string(tag));
  auto& state = lanes_[static_cast<int>(lane)];
  std::vector<at::Tensor> tensors{
      at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte))};
  NoPythonObjects guard;
  // Held while the op is posted: cancel() must see every work there is.
  std::lock_guard<std::mutex> lock(state->mutex);
  if (!state->backend) throw TransportError(Kind::cancelled, peer, "the lane was cancelled");
  try {
    WorkPtr work = send ? state->backend->send(tensors, peer, static_cast<int>(tag))
                        : state->backend->recv(tensors, peer, static_cast<int>(tag));
    state->works.push_back(std::move(work));
  } catch (const std::exception& error) {
    throw TransportError(kindOf(error.what()), peer, firstLine(error.what()));
  }
  return std::make_unique<GlooTransfer>(state, std::prev(state->works.end()), peer);
}

void GlooTransport::cancel(Lane lane) {
  auto& state = lanes_[static_cast<int>(lane)];
  BackendPtr dropped;
  std::list<WorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    dropped = std::move(state->backend);
    state->backend.reset();
    works.swap(state->works);
  }
  for (auto& work : works) {
    try {
      work->abort();
    } catch (const std::exception&) {
      // A work that is already done needs no abort.
    }
  }
}

std::unique_ptr<Transport> connectGloo(const StoreRendezvous& rendezvous, int rank, int size,
                                       const c10::intrusive_ptr<Options>& options, int connections,
                                       const MakeGloo& make) {
  const auto lane = [&](const std::string& name, int connections) {
    const auto keys = c10::make_intrusive<c10d::PrefixStore>("lowcomm/lane/" + name + "/lane", rendezvous.store());
    return make(keys, rank, size, options, connections);
  };
  // In an order that every rank shares: both wait for all ranks.
  BackendPtr control = lane("control", 1);
  BackendPtr bulk = lane("bulk", connections);
  return std::make_unique<GlooTransport>(std::move(control), std::move(bulk));
}

namespace {

// Keeps the first line of an error's text: torch appends a stack, line by line.
template <class F>
auto inOneLine(F&& read) {
  try {
    return read();
  } catch (const std::exception& error) {
    const std::string why(error.what());
    throw std::runtime_error(why.substr(0, why.find('\n')));
  }
}

}  // namespace

void StoreRendezvous::set(const std::string& key, const std::string& value) {
  store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

void StoreRendezvous::wait(const std::string& key, std::chrono::milliseconds timeout) {
  std::exception_ptr late;
  bool raised = false;
  const auto ended = [&](std::chrono::milliseconds patience) {
    const auto begin = std::chrono::steady_clock::now();
    try {
      if (!raised) store_->wait({key}, std::max(patience, std::chrono::milliseconds(1)));
      return true;
    } catch (const std::exception&) {
      late = std::current_exception();
      if (std::chrono::steady_clock::now() - begin < patience) throw;  // no time-out
      return false;
    }
  };
  inOneLine([&] {
    if (!waitWithSignals(timeout, ended, [&](const std::string&) { raised = true; })) std::rethrow_exception(late);
  });
}

std::string StoreRendezvous::get(const std::string& key) {
  return inOneLine([&] {
    const std::vector<uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  });
}

}  // namespace lowcomm

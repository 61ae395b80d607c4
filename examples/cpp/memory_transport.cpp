#include "memory_transport.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lowcomm {
namespace {

using Kind = TransportError::Kind;

struct Slot {
  int peer = 0;
  std::span<const std::byte> out;
  std::span<std::byte> in;
  bool done = false;
  bool failed = false;
  Kind kind = Kind::closed;
  std::string why;
};
using SlotPtr = std::shared_ptr<Slot>;

struct Mailbox {
  std::deque<SlotPtr> sends, receives;
};

}  // namespace

struct MemoryHub::State {
  explicit State(int size) : size(size), ended(size), stalled(size) {}

  using Key = std::tuple<Lane, int, int, uint32_t>;  // lane, from, to, tag

  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Key, Mailbox> mailboxes;
  std::vector<std::array<bool, kLanes>> ended;
  std::vector<char> stalled;
  Tamper tamper;

  void deliver(const Key& key, Mailbox& box) {
    auto [lane, from, to, tag] = key;
    while (!stalled[from] && !stalled[to] && !box.sends.empty() && !box.receives.empty()) {
      SlotPtr send = box.sends.front(), receive = box.receives.front();
      box.sends.pop_front();
      box.receives.pop_front();
      if (send->out.size() > receive->in.size()) {
        receive->failed = true;
        receive->why = "a message of " + std::to_string(send->out.size()) + " bytes for a receive of " +
                       std::to_string(receive->in.size());
      } else if (!send->out.empty()) {
        std::memcpy(receive->in.data(), send->out.data(), send->out.size());
        if (tamper) tamper(from, to, lane, receive->in.first(send->out.size()));
      }
      end(*send);
      end(*receive);
    }
    changed.notify_all();
  }

  // Fails what is pending between `rank` and anybody on `lane`: cancelled on its own side, closed on the others'.
  void end(int rank, Lane lane, Kind own) {
    std::lock_guard<std::mutex> lock(mutex);
    ended[rank][static_cast<int>(lane)] = true;
    for (auto& [key, box] : mailboxes) {
      auto [at, from, to, tag] = key;
      if (at != lane || (from != rank && to != rank)) continue;
      fail(box.sends, from == rank ? own : Kind::closed);
      fail(box.receives, to == rank ? own : Kind::closed);
    }
    changed.notify_all();
  }

  static void fail(std::deque<SlotPtr>& slots, Kind kind) {
    for (SlotPtr& slot : slots)
      fail(*slot, kind, kind == Kind::cancelled ? "the lane was cancelled" : "connection closed by peer");
    slots.clear();
  }

  static void fail(Slot& slot, Kind kind, const char* why) {
    if (slot.done) return;
    slot.failed = true;
    slot.kind = kind;
    slot.why = why;
    end(slot);
  }

  static void end(Slot& slot) { slot.done = true; }
};

namespace {

class MemoryTransfer : public Transfer {
 public:
  MemoryTransfer(std::shared_ptr<MemoryHub::State> state, SlotPtr slot)
      : state_(std::move(state)), slot_(std::move(slot)) {}

  void wait(std::chrono::milliseconds deadline) override {
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (!state_->changed.wait_for(lock, deadline, [&] { return slot_->done; })) {
      throw TransportError(Kind::timed_out, slot_->peer, "no byte for " + std::to_string(deadline.count()) + " ms");
    }
    if (slot_->failed) throw TransportError(slot_->kind, slot_->peer, slot_->why);
  }

 private:
  std::shared_ptr<MemoryHub::State> state_;
  SlotPtr slot_;
};

class MemoryTransport : public Transport {
 public:
  MemoryTransport(std::shared_ptr<MemoryHub::State> state, int rank) : state_(std::move(state)), rank_(rank) {}
  ~MemoryTransport() override {
    for (Lane lane : {Lane::control, Lane::bulk})
      cancel(lane);
  }

  int rank() const override { return rank_; }
  int size() const override { return state_->size; }

  std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) override {
    auto slot = std::make_shared<Slot>();
    slot->peer = peer;
    slot->out = data;
    return post({lane, rank_, peer, tag}, &Mailbox::sends, std::move(slot));
  }

  std::unique_ptr<Transfer> irecv(Lane lane, int peer, uint32_t tag, std::span<std::byte> data) override {
    auto slot = std::make_shared<Slot>();
    slot->peer = peer;
    slot->in = data;
    return post({lane, peer, rank_, tag}, &Mailbox::receives, std::move(slot));
  }

  void cancel(Lane lane) override { state_->end(rank_, lane, Kind::cancelled); }

  std::optional<uint32_t> unclaimed(Lane lane, int peer, uint32_t first, uint32_t end) override {
    std::lock_guard<std::mutex> lock(state_->mutex);
    const auto from = state_->mailboxes.lower_bound({lane, peer, rank_, first});
    const auto to = state_->mailboxes.lower_bound({lane, peer, rank_, end});
    const auto found = std::find_if(from, to, [](const auto& box) { return !box.second.sends.empty(); });
    return found == to ? std::nullopt : std::optional(std::get<3>(found->first));
  }

 private:
  std::unique_ptr<Transfer> post(MemoryHub::State::Key key, std::deque<SlotPtr> Mailbox::* queue, SlotPtr slot) {
    std::lock_guard<std::mutex> lock(state_->mutex);
    Mailbox& box = state_->mailboxes[key];
    (box.*queue).push_back(slot);
    const int lane = static_cast<int>(std::get<0>(key));
    if (state_->ended[rank_][lane]) {
      MemoryHub::State::fail(box.*queue, Kind::cancelled);
    } else if (state_->ended[slot->peer][lane]) {
      MemoryHub::State::fail(box.*queue, Kind::closed);
    } else {
      state_->deliver(key, box);
    }
    if (box.sends.empty() && box.receives.empty()) state_->mailboxes.erase(key);  // tags come without end
    return std::make_unique<MemoryTransfer>(state_, std::move(slot));
  }

  std::shared_ptr<MemoryHub::State> state_;
  int rank_;
};

}  // namespace

MemoryHub::MemoryHub(int size) : state_(std::make_shared<State>(size)) {}
MemoryHub::~MemoryHub() = default;

std::unique_ptr<Transport> MemoryHub::transport(int rank) {
  return std::make_unique<MemoryTransport>(state_, rank);
}

void MemoryHub::kill(int rank) {
  for (Lane lane : {Lane::control, Lane::bulk})
    state_->end(rank, lane, Kind::closed);
}

void MemoryHub::stall(int rank) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stalled[rank] = true;
}

void MemoryHub::resume(int rank) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stalled[rank] = false;
  for (auto& [key, box] : state_->mailboxes)
    state_->deliver(key, box);
}

void MemoryHub::tamper(Tamper tamper) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->tamper = std::move(tamper);
}

}  // namespace lowcomm

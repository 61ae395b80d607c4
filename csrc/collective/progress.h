#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lowcomm {

// How far an op or a message has got, for whoever looks from another thread while it runs: one entry of the flight
// record (engine/flight.h). Thread-safe.
class OpProgress {
 public:
  using Clock = std::chrono::steady_clock;

  enum class Status { queued, under_way, done, failed };

  // Frames of one peer. In a collective frame 0 is the description of the op.
  struct Frames {
    uint32_t received = 0, expected = 0;
  };

  // The transfer that the op waits for, or that it failed on (perhaps when it was to begin).
  struct Wait {
    int peer;
    std::optional<uint32_t> frame;  // its number among those of this op between the two ranks, in its direction
    const char* doing;              // a literal: "waiting for a frame"
    Clock::time_point since;
  };

  struct State {
    std::string op;
    uint32_t sequence = 0;
    Status status = Status::queued;
    std::vector<std::pair<std::string, std::string>> description;  // what ranks compare; empty until the op starts
    std::vector<Frames> frames;                                    // by rank; empty where none are to come
    std::optional<Wait> wait;
    uint64_t sent_bytes = 0, received_bytes = 0;  // frame headers included
    Clock::time_point queued = Clock::now();
    std::optional<Clock::time_point> started, ended;
    std::string error;  // of one that failed

    bool over() const { return status == Status::done || status == Status::failed; }

    void start() {
      if (status != Status::queued) return;
      status = Status::under_way;
      started = Clock::now();
    }

    // With an empty `why` it is done. The first end counts.
    void end(const std::string& why) {
      if (over()) return;
      status = why.empty() ? Status::done : Status::failed;
      ended = Clock::now();
      error = why;
      if (why.empty()) wait.reset();
    }
  };

  OpProgress(std::string op, uint32_t sequence) {
    state_.op = std::move(op);
    state_.sequence = sequence;
  }

  template <class F>
  void update(F&& change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change(state_);
  }

  State state() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return state_;
  }

  bool over() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return state_.over();
  }

  bool queued() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return state_.status == Status::queued;
  }

 private:
  mutable std::mutex mutex_;
  State state_;
};

}  // namespace lowcomm

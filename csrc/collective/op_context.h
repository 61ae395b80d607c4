#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/transport.h"

namespace lowcomm {

// How far an op or a message has got, readable from other threads while it runs: one entry of the flight record
// (engine/flight.h). Thread-safe.
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

// The loss of encoding, in squares: of ||decoded - x|| and ||x||.
struct Loss {
  double lost = 0, whole = 0;

  bool taken() const { return whole > 0; }
};

// The samples of a message whose two sides remember them (pipeline/delta_source_sink.h): how many travelled as changes,
// for the first time, and without a slot for want of room, and sums over some of the changes' elements a and what was
// remembered of them, m.
struct SampleCounters {
  uint64_t seen = 0, first = 0, overflow = 0;
  uint64_t measured = 0;           // elements in the sums
  double values = 0, changes = 0;  // of |a| and of |a - m|

  SampleCounters& operator+=(const SampleCounters& more) {
    seen += more.seen;
    first += more.first;
    overflow += more.overflow;
    measured += more.measured;
    values += more.values;
    changes += more.changes;
    return *this;
  }
};

// The bytes that one op moved, and where its time went.
struct OpCounters {
  uint64_t raw_bytes = 0;   // what this rank would send without a codec, headers aside
  uint64_t wire_bytes = 0;  // sent by this rank, frame headers included
  uint64_t received_bytes = 0;
  // Bytes copied between a device and the host for the op, codes or values.
  uint64_t device_to_host_bytes = 0, host_to_device_bytes = 0;
  std::chrono::nanoseconds encode{0}, wait{0}, decode{0};
  std::vector<std::chrono::nanoseconds> wait_by_peer;  // `wait` by rank; empty where nothing was waited for
  Loss loss;                                           // of a sample of what this rank encoded
  SampleCounters samples;                              // that this rank sent
  bool exact = false;                                  // of an optimizer's op: none of it was coded
};

// An op's ways to spend its time.
enum class Doing : uint8_t { encode, wait, decode };

// A stretch of an op's time, for a profiler.
struct Stretch {
  Doing doing;
  std::chrono::steady_clock::time_point start, end;
};
using Timeline = std::vector<Stretch>;

enum class FrameKind : uint8_t;
struct FrameHeader;
struct GroupContext;

// A peer could not send its data, or issued another op than this rank (a caller's mistake), and the conversation stayed
// whole. The op failed, the group did not.
struct PeerRefusal : PeerError {
  using PeerError::PeerError;
};

inline constexpr size_t kMaxErrorText = 1024;  // of an error frame

// Every op of the worker has tags of its own: kOpTags of them on each lane, by its sequence number. They are used again
// after kTaggedOps ops.
inline constexpr uint32_t kOpTags = 64;
inline constexpr uint32_t kTaggedOps = 1 << 22;
inline constexpr uint32_t kAgreementTag = 0, kCountsTag = 2;  // among them, of the control lane

// One op in progress, on the group's worker or on another thread.
class OpContext {
 public:
  using Clock = std::chrono::steady_clock;

  OpContext(GroupContext& group, std::string op, uint32_t sequence);

  GroupContext& group;
  const std::string op;
  uint32_t sequence;         // where it is not known from the start it is 0 until then
  const uint32_t first_tag;  // of the op's own, by the first of its numbers (firstTag)
  const Clock::time_point start;
  OpCounters counters;
  std::shared_ptr<OpProgress> progress;  // its entry in the flight record; null where nothing is recorded
  Timeline* timeline = nullptr;          // where a profiler wants to know; else null
  bool is_numbered_alike = false;        // by all ranks, as ops of the worker are
  bool conversing = false;  // between the first transfer and the last: what is thrown then leaves peers with half an op
  bool whole = false;       // all its transfers are through: what is thrown from then on concerns this rank alone

  // The first of an op's tags.
  static uint32_t firstTag(uint32_t sequence);

  // This rank's number in the group.
  int rank() const;
  int size() const;
  size_t chunkBytes() const;
  const std::vector<uint64_t>& sliceWeights() const;  // LinkShares::weights

  // Header of a frame of this op: sequence and epoch filled in.
  FrameHeader header(FrameKind kind) const;

  // Begins a transfer with `peer`: `start` hands it to the transport. A failure becomes a TransferError.
  template <class F>
  std::unique_ptr<Transfer> begin(int peer, F&& start) const {
    try {
      return start();
    } catch (const TransportError& error) {
      fail(peer, error, "starting a transfer");
    }
  }

  // Waits under the progress deadline; a failure becomes a TransferError that carries the whole story. `doing` is a
  // literal, of a receive "waiting for ..."; `frame` the frame's number, where it is a frame (OpProgress::Wait). A
  // `deadline` takes the place of the group's. `peer` below 0 is any rank.
  void wait(Transfer& transfer, int peer, const char* doing, std::optional<uint32_t> frame = std::nullopt,
            std::optional<std::chrono::milliseconds> deadline = std::nullopt);

  // Adds to the counter of what was done, and to the timeline.
  void spent(Doing doing, Clock::time_point start, Clock::time_point end);

  // The peer's description of this op has come: it is in no other one, or in one that follows.
  void met(int peer);

  // Changes the op's entry in the flight record; `change` gets an OpProgress::State.
  template <class F>
  void note(F&& change) const {
    if (progress) progress->update(change);
  }

  // Its entry in the flight record ends with what was counted, and with `why`.
  void noteFailure(const std::string& why) const;

  // Runs a check of what `peer` sent: a WireError becomes a PeerError that names it.
  template <class F>
  void attribute(int peer, F&& check) const {
    try {
      check();
    } catch (const WireError& error) {
      fail(peer, error.what());
    }
  }

  // The text of this rank's error frames: why it cannot send.
  std::string refusal(const ValueError& mistake) const;

  // A PeerRefusal: this rank and `peer` issued different ops under one number. `difference` names the field, both
  // values and both ranks.
  std::exception_ptr differs(int peer, const std::string& difference) const;

  // A PeerRefusal with `why` and the whole story.
  std::exception_ptr refusedBecause(int peer, const std::string& why) const;

  // Throws PeerRefusal: a peer's error frame said why; the text may be empty.
  [[noreturn]] void refused(int peer, const std::string& why) const;

  // Throws PeerError: op, sequence, group, both ranks, bytes done, elapsed.
  [[noreturn]] void fail(int peer, const std::string& why) const;

  // Throws TransferError: the same of a transfer that failed while `doing`.
  [[noreturn]] void fail(int peer, const TransportError& error, const char* doing) const;

 private:
  void receive(Transfer& transfer, int peer, std::chrono::milliseconds deadline) const;
  std::optional<uint32_t> otherOpOf(int peer) const;
  std::string story(int peer, const std::string& why) const;
  std::string numbers() const;

  std::vector<bool> met_;  // by rank
};

// The time until it goes out of scope is spent on that.
class Stopwatch {
 public:
  Stopwatch(OpContext& op, Doing doing) : op_(op), doing_(doing), start_(OpContext::Clock::now()) {}
  ~Stopwatch() { op_.spent(doing_, start_, OpContext::Clock::now()); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  OpContext& op_;
  const Doing doing_;
  const OpContext::Clock::time_point start_;
};

}  // namespace lowcomm

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "collective/counters.h"
#include "collective/progress.h"

namespace lowcomm {

class Transfer;
enum class FrameKind : uint8_t;
struct FrameHeader;
struct GroupContext;
struct TransportError;

// A peer could not send its data, or issued another op than this rank (a caller's mistake). The conversation stayed
// whole: the op failed, the group did not.
struct PeerRefused : PeerError {
  using PeerError::PeerError;
};

inline constexpr size_t kMaxErrorText = 1024;  // of an error frame

// One op in progress, on the group's worker or on another thread.
class OpContext {
 public:
  using Clock = std::chrono::steady_clock;

  OpContext(GroupContext& group, std::string op, uint32_t sequence)
      : group(group), op(std::move(op)), sequence(sequence), start(Clock::now()) {}

  GroupContext& group;
  const std::string op;
  uint32_t sequence;  // where it is not known from the start it is 0 until then
  const Clock::time_point start;
  OpCounters counters;
  std::shared_ptr<OpProgress> progress;  // its entry in the flight record; null where nothing is recorded
  Timeline* timeline = nullptr;          // where a profiler wants to know; else null
  bool conversing = false;  // between the first transfer and the last: what is thrown then leaves peers with half an op
  bool whole = false;       // all its transfers are through: what is thrown from then on concerns this rank alone

  // Of the group.
  int rank() const;
  int size() const;
  size_t chunkBytes() const;

  // Header of a frame of this op: sequence and epoch filled in.
  FrameHeader header(FrameKind kind) const;

  // Waits under the progress deadline; a failure becomes a TransferError that carries the whole story. `doing` is a
  // literal; `frame` the frame's number, where it is a frame (OpProgress::Wait).
  void wait(Transfer& transfer, int peer, const char* doing, std::optional<uint32_t> frame = std::nullopt);

  // Adds to the counter of what was done, and to the timeline.
  void spent(Doing doing, Clock::time_point start, Clock::time_point end);

  // Changes the op's entry in the flight record; `change` gets an OpProgress::State.
  template <class F>
  void note(F&& change) const {
    if (progress) progress->update(change);
  }

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

  // A PeerRefused: this rank and `peer` issued different ops under one number. `difference` names the field, both
  // values and both ranks.
  std::exception_ptr differs(int peer, const std::string& difference) const;

  // A PeerRefused with `why` and the whole story.
  std::exception_ptr refusedBecause(int peer, const std::string& why) const;

  // Throws PeerRefused: a peer's error frame said why; the text may be empty.
  [[noreturn]] void refused(int peer, const std::string& why) const;

  // Throws PeerError: op, sequence, group, both ranks, bytes done, elapsed.
  [[noreturn]] void fail(int peer, const std::string& why) const;

  // Throws TransferError: the same of a transfer that failed while `doing`.
  [[noreturn]] void fail(int peer, const TransportError& error, const char* doing) const;

 private:
  std::string story(int peer, const std::string& why) const;
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

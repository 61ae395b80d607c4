#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "collective/context.h"
#include "engine/flight.h"

namespace lowcomm {

// The ops of a group on this rank: those that are queued, the one that runs, the threads that run a part of an op
// beside it, and why the group has ended. Thread-safe: it owns the engine's lock, under which it calls only the flight
// record.
class GroupOps {
 public:
  // A job may throw; `done` gets what it threw (or null) and what it moved.
  using Job = std::function<void(OpContext&)>;
  using Done = std::function<void(std::exception_ptr, const OpCounters&)>;
  struct Entry {
    std::string op;
    uint32_t sequence = 0;
    Job job;
    Done done;
    std::shared_ptr<OpProgress> progress = nullptr;
  };

  // Both outlive this.
  GroupOps(GroupContext& group, FlightRecord& record) : group_(group), record_(record) {}

  // Gives the op its sequence number, `given` or the next, and queues it. If the group is over, `entry` stays the
  // caller's and the reason is returned, as PeerError; else null.
  std::exception_ptr add(Entry& entry, std::optional<uint32_t> given);

  // For the worker: waits for the next op to run, and takes it; false after stop(), once none is left. Then: nothing of
  // the op that was taken is left.
  bool take(Entry& entry);
  void finished();

  // Counts a thread that runs a part of an op beside the worker, from enter() to leave(). enter() returns why it
  // cannot.
  std::exception_ptr enter(const std::string& op);
  void leave();

  // The end of the group. Returns whether `why` is the first cause.
  bool end(const std::string& why);
  // Replaces the first cause by one that says more.
  void explainEnd(const std::string& why);
  std::string endedWhy();  // empty while the group lives
  // Why an op cannot run, as PeerError.
  std::exception_ptr ended(const std::string& op);

  // No op is added from now on, and no thread enters.
  void stop();

  // Waits until all ops have ended, for at most `patience`; returns whether they have.
  bool waitUntilIdle(std::chrono::milliseconds patience);
  // Waits, after stop(), until no thread is inside.
  void waitUntilLeft();

  uint32_t lastSequence();

 private:
  std::exception_ptr endedNow(const std::string& op) const;

  GroupContext& group_;
  FlightRecord& record_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  size_t running_inline_ = 0;  // threads
  bool busy_ = false, stopping_ = false;
  std::string ended_why_;  // the first cause; empty while the group lives
  uint32_t sequence_ = 0;
};

}  // namespace lowcomm

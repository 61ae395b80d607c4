#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "collective/context.h"
#include "engine/flight.h"
#include "engine/notice.h"

namespace lowcomm {

// The ops of a group on this rank: those that are queued, the one that runs, the threads that run a part of an op
// beside it or cancel one, and the causes of ops that were cancelled before they were submitted here; and why the group
// has ended. Thread-safe: it owns the engine's lock, under which it calls only the group, its flight record and
// cancellations.
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
    std::shared_ptr<Cancellation> cancellation = nullptr;  // set by add()
  };

  // Both outlive this.
  GroupOps(GroupContext& group, FlightRecord& record) : group_(group), record_(record) {}

  // Gives the op its sequence number, `given` or the next, and queues it. If the group is over or another rank has
  // cancelled the op, `entry` stays the caller's and the reason is returned.
  struct Refused {
    std::exception_ptr error;
    bool is_over;  // the group
  };
  std::optional<Refused> add(Entry& entry, std::optional<uint32_t> given);

  // For the worker: waits for an op or stop(); takes the next op to run; the op that was taken has run, and its `done`
  // is about to be called; nothing of it is left.
  enum class Next { op, none, stop };
  void waitForOp();
  Next take(Entry& entry);
  void ran();
  void finished();

  // Counts a thread that runs a part of an op beside the worker, from enter() to leave(). enter() returns why it
  // cannot.
  std::exception_ptr enter(const std::string& op);
  void leave();

  // Counts a thread that cancels something; false if the group has ended.
  bool enterCancel();
  void leaveCancel();

  // Cancels an op, once: on this rank's wish, or on the notice of the rank `from`. Returns nothing if it is over or was
  // cancelled before; else what is to be closed, and the op, if it was queued and this rank wished it.
  struct Cancelled {
    std::shared_ptr<Cancellation> cancellation;
    std::optional<Entry> queued;
  };
  std::optional<Cancelled> cancel(const OpNotice& notice, std::optional<int> from);

  // The end of the group. Returns whether `why` is the first cause.
  bool end(const std::string& why);
  // Replaces the first cause by one that says more.
  void explainEnd(const std::string& why);
  std::string endedWhy();  // empty while the group lives
  // Why an op cannot run, as PeerError.
  std::exception_ptr ended(const std::string& op);

  // No op is added from now on, and no thread enters.
  void stop();
  bool isStopping();

  // Waits until all ops and cancels have ended, for at most `patience`; returns whether they have.
  bool waitUntilIdle(std::chrono::milliseconds patience);
  // Waits, after stop(), until no thread is inside.
  void waitUntilLeft();
  void wake() { changed_.notify_all(); }

  uint32_t lastSequence();

 private:
  // An op that was cancelled, kept until every peer's notice has come and its number has been submitted here.
  struct CancelledOp {
    Cancellation::Cause cause;
    int notices;  // that are to come
  };
  void forgetPast();
  std::exception_ptr endedNow(const std::string& op) const;

  GroupContext& group_;
  FlightRecord& record_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  std::shared_ptr<Cancellation> current_;  // of the op that runs
  uint32_t current_sequence_ = 0;
  std::map<uint32_t, CancelledOp> cancelled_;   // by sequence
  size_t cancelling_ = 0, running_inline_ = 0;  // threads
  bool busy_ = false, stopping_ = false;
  std::string ended_why_;  // the first cause; empty while the group lives
  uint32_t sequence_ = 0;
};

}  // namespace lowcomm

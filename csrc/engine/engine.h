#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collective/context.h"
#include "collective/p2p.h"
#include "engine/flight.h"
#include "engine/notice.h"

namespace lowcomm {

// The queue and the worker of one group. Ops run one at a time in order of submit(), which every rank must share; each
// gets the group's next sequence number. Thread-safe.
//
// A fault (a peer died, stalled past the deadline or sent what it must not) ends the group: its peers are told why over
// the control lane, the bulk lane is given up, and every later op fails at once with the first cause. A caller's
// mistake (ValueError, PeerRefusal) ends only its op, and so does what fails on this rank once an op's exchange is
// whole.
class Engine {
 public:
  // A job may throw; `done` gets what it threw (or null) and what it moved, on the worker, before the next job starts.
  using Job = std::function<void(OpContext&)>;
  using Done = std::function<void(std::exception_ptr, const OpCounters&)>;

  Engine(std::unique_ptr<Transport> transport, GroupConfig config);
  ~Engine();  // as shutdown()
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Returns the op's sequence number: `sequence` where the caller counts the group's ops itself (every rank gives the
  // same one), else the next. After abort() or a fault, `done` is called at once, on the calling thread.
  uint32_t submit(std::string op, Job job, Done done, std::optional<uint32_t> sequence = std::nullopt);

  // Runs `part` of an op on the calling thread, next to the worker and any number of other such threads: posting or
  // finishing a point-to-point message. Returns what a job's Done would get, by the same rules: a fault ends the group.
  // After abort(), a fault or shutdown() the part does not run.
  std::exception_ptr runInline(OpContext& op, const std::function<void()>& part);

  // The group's messages between two ranks; send(), recv() and finish() are called in runInline() only.
  P2p& messages() { return messages_; }

  // Returns when everything submitted before has ended.
  void drain();

  // Fails what is queued and under way with `why`, tells the peers, and ends the group. Returns without waiting for the
  // op under way; its Done comes from the worker as soon as its wait is broken.
  void abort(const std::string& why);

  // Ends the worker after what is queued, then both lanes, and with them what runs next to the worker; returns when
  // that has ended too. Any number of times, not from runInline().
  void shutdown();

  // As drain(), for at most `patience`; whether everything has ended.
  bool drainFor(std::chrono::milliseconds patience);

  // The group's last ops and messages, those of the inner backend too where the caller adds them. Written to a file,
  // which the error of the group's end names, by a fault and by abort().
  FlightRecord& record() { return record_; }

  // Ends the group for a fault of an op that ran elsewhere, over the inner backend's connections; `message` is its
  // error. Peers are told, and the first of them that has said why it gave up is listened to. Returns what the error
  // adds: what was heard, where the flight record is; where the group was over before, its first cause.
  // `progress` is the op's entry in the flight record, null where nothing is recorded.
  std::string fault(const std::string& message, uint32_t sequence,
                    const std::shared_ptr<OpProgress>& progress = nullptr);

  // The first cause of the group's end; empty while it lives.
  std::string endedWhy();

  // The transport's report of its connections.
  std::vector<ConnectionReport> connections() const { return transport_->report(); }

  void setTimeout(std::chrono::milliseconds timeout) { group_.timeout_ms = timeout.count(); }
  const GroupContext& group() const { return group_; }
  GroupContext& group() { return group_; }

 private:
  struct Entry {
    std::string op;
    uint32_t sequence;
    Job job;
    Done done;
    std::shared_ptr<OpProgress> progress;
  };
  void loop();
  std::exception_ptr attempt(OpContext& op, const std::function<void()>& job);
  std::exception_ptr tried(OpContext& op, const std::function<void()>& job);
  std::exception_ptr abandon(OpContext& op, const std::exception& why);
  std::exception_ptr lose(OpContext& op, const PeerError& lost);
  bool end(std::string& message);
  void tell(const std::string& message, uint32_t sequence);
  void settle(std::string& message);
  std::exception_ptr ended(const std::string& op) const;

  std::unique_ptr<Transport> transport_;
  GroupContext group_;
  FlightRecord record_;
  NoticeBoard notices_;
  P2p messages_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  bool busy_ = false, stopping_ = false;
  size_t running_inline_ = 0;  // threads in runInline()
  std::string ended_why_;      // the first cause; empty while the group lives
  uint32_t sequence_ = 0;
  std::mutex joining_;
  std::thread worker_;
};

}  // namespace lowcomm

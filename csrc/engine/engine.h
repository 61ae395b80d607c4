#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collective/context.h"
#include "engine/flight.h"
#include "engine/group_ops.h"
#include "engine/notice.h"
#include "messages/p2p.h"

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
  // `done` is called on the worker, before the next job starts.
  using Job = GroupOps::Job;
  using Done = GroupOps::Done;

  Engine(std::unique_ptr<Transport> transport, GroupConfig config);
  ~Engine();  // as shutdown()

  // Returns the op's sequence number: `sequence` where the caller counts the group's ops itself (every rank gives the
  // same one), else the next. After abort() or a fault, `done` is called at once, on the calling thread.
  uint32_t submit(std::string op, Job job, Done done, std::optional<uint32_t> sequence = std::nullopt);

  // Runs `part` of an op on the calling thread, next to the worker and any number of other such threads: posting or
  // finishing a point-to-point message. Returns what a job's Done would get, by the same rules: a fault ends the group.
  // After abort(), a fault or shutdown() the part does not run.
  std::exception_ptr runInline(OpContext& op, const std::function<void()>& part);

  // As runInline(), for a part that waits for a peer: handlers of signals run meanwhile (base/signals.h). Throws what
  // one raised, after interrupt().
  std::exception_ptr waitInline(OpContext& op, const std::function<void()>& part);

  // The group's messages between two ranks; send(), recv() and finish() are called in runInline() only.
  P2p& messages() { return messages_; }

  // Returns when everything submitted before has ended. Handlers of signals run meanwhile, as in waitInline().
  void drain();

  // Fails what is queued and under way with `why`, tells the peers, and ends the group. Returns without waiting for the
  // op under way; its Done comes from the worker as soon as its wait is broken.
  void abort(const std::string& why);

  // abort() without a message to the peers: they see the connections close.
  void breakOff(const std::string& why);

  // abort() for a signal handler that raised an exception of this name in a wait for `op`.
  void interrupt(const std::string& op, const std::string& name);

  // Ends the worker after what is queued, then, after awaitArrivals(), both lanes, and with them what runs next to the
  // worker; returns when that has ended too. Any number of times, not from runInline().
  void shutdown();

  // Whether the frames of ops and messages that have ended here have arrived (LeavingFrames::flush), each within
  // `patience`, or the progress deadline, of the one before; a line to stderr says who has not received them. From then
  // on ops wait for all of theirs.
  bool awaitArrivals(std::chrono::milliseconds patience = kArrivals);
  static constexpr std::chrono::seconds kArrivals{10};

  // drain() for at most `patience`; returns whether everything has ended.
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
  void loop();
  void runOp(GroupOps::Entry& entry);
  std::exception_ptr attempt(OpContext& op, const std::function<void()>& job);
  std::exception_ptr tried(OpContext& op, const std::function<void()>& job);
  std::exception_ptr lose(OpContext& op, const PeerError& lost);
  bool end(std::string& message);
  void tell(const std::string& message, uint32_t sequence);
  void breakBulk(std::string& message);
  void cancelWaits();

  std::unique_ptr<Transport> transport_;
  GroupContext group_;
  FlightRecord record_;
  NoticeBoard notices_;
  P2p messages_;
  GroupOps ops_;
  std::mutex joining_;
  std::thread worker_;
};

}  // namespace lowcomm

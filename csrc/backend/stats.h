#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collective/context.h"

namespace lowcomm {

// Counters of one op of one group, since the group was made or reset() was called.
struct OpStats {
  uint64_t calls = 0;
  uint64_t exact_calls = 0;                          // of these, sent without a codec
  std::map<std::string, uint64_t> exact_because;     // tensors that went exact though somebody named the op, by reason
  uint64_t without_units = 0;                        // sends of [batch, time, width] whose codec ties tokens together
  uint64_t staged_calls = 0;                         // encoded and decoded on a device
  std::map<std::string, uint64_t> unstaged_because;  // coded calls of CUDA tensors that copied values, by reason
  uint64_t raw_bytes = 0;                            // what this rank would have sent without a codec
  uint64_t inner_bytes = 0;                          // of these, handed to the inner backend, which does not count
  uint64_t wire_bytes = 0;  // what it sent, headers included; 0 for ops the inner backend serves
  uint64_t device_to_host_bytes = 0, host_to_device_bytes = 0;  // of tensors on a device: codes, or values
  double encode_s = 0, wait_s = 0, decode_s = 0;

  // Adds another op's counters, whose peers are those that `peers` has for their ranks; a rank beyond it is itself.
  void add(const OpStats& other, const std::vector<uint64_t>& peers);

  // The peer that was waited for most; nothing where none was.
  std::optional<int> straggler() const;
  // ||decoded - x|| / ||x||; nothing where nothing was sampled.
  std::optional<double> relativeError() const;
  std::vector<double> wait_by_peer_s;  // of wait_s, by group rank; empty where nothing was waited for
  double loss = 0, encoded = 0;        // squares over what was sampled of what this rank encoded: of the error, of x
  SampleCounters samples;              // of a pipeline's sends: what they said of samples
  std::map<std::string, uint64_t> forgotten;  // of a pipeline: samples that were forgotten, by reason
  bool counted = false;                       // whether wire_bytes is counted: lowcomm's own ops
};

// Thread-safe: callers count calls, the worker counts what moved.
class Stats {
 public:
  void call(const std::string& op, bool exact);
  // Whether it is the first for this reason.
  bool because(const std::string& op, const std::string& reason);
  void staged(const std::string& op);
  // Whether it is the first.
  bool withoutUnits(const std::string& op);
  // Whether it is the first for this reason.
  bool unstaged(const std::string& op, const std::string& reason);
  void inner(const std::string& op, uint64_t raw_bytes);
  void moved(const std::string& op, const OpCounters& counters);
  void forgot(const std::string& op, const std::string& why, uint64_t samples);
  std::map<std::string, OpStats> snapshot() const;
  void reset();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, OpStats> ops_;
};

// The profiler that a thread is under. Copies keep its memory, not its life.
class ProfilerHere {
 public:
  // Remembers the profiler state of the calling thread.
  ProfilerHere();

  // Whether one runs. Once it does not it will never again: its events are being collected, or gone.
  bool running() const;

  std::shared_ptr<c10::ThreadLocalDebugInfo> held() const { return held_; }

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> held_;  // null where none ran
};

// The ranges that torch.profiler shows for an op of lowcomm: "lowcomm::all_gather" and, inside it,
// "lowcomm::all_gather::encode", "::wait" and "::decode", on the thread that ran it.
//
// The profiler records the thread that started it, and those that join it. If the worker opened a range by a
// RecordFunction, closing it would write into the profiler's memory, which is freed if the profiler was stopped while
// the op ran. So the op records its times itself, and passes them on, begin and end, when it has ended and before its
// Work completes: a thread that waits for the op and then stops the profiler has them all. An op that outlives the
// profiler under which it was issued is not shown, not by a later profiler either.
class ProfilerRanges {
 public:
  // Null unless a profiler runs on the calling thread: nothing is then taken down.
  static std::shared_ptr<ProfilerRanges> ofCaller(const std::string& op);

  // From now on the op's stretches are taken down. This outlives the op.
  void follow(OpContext& op) { op.timeline = &timeline_; }

  // Once, when the op has ended, on the thread that ran it.
  void report() const;

 private:
  explicit ProfilerRanges(const std::string& op) : name_("lowcomm::" + op) {}

  const std::string name_;
  const ProfilerHere profiler_;  // the issuing thread's
  Timeline timeline_;
};

}  // namespace lowcomm

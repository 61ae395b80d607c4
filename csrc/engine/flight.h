#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "collective/context.h"
#include "collective/op_context.h"

namespace lowcomm {

// A group's history: its last ops and messages, in order of issue. Thread-safe.
//
// As JSON, an object:
//   "format"        1
//   "group"         name of the group; "size": its ranks; "epoch": of its frames
//   "rank"          this rank in the group; "global_rank": in the world, null if unknown; "pid"
//   "unix_time_s"   now; every time below is relative to it, in seconds, negative: ago
//   "because"       why it was written; "" if the caller only asked for it
//   "ops"           the ops and messages, oldest first, each an object:
//     "op", "sequence"    as in errors; a message's is its number among those of its peer, tag and direction
//     "state"             "queued", "under way", "done" or "failed"
//     "description"       what ranks compare: "tensors", "dtype", "elements a rank", "codec", ...; {} until it starts
//     "missing"           of an op in progress or failed: the peers whose frames have not all arrived, each
//                         {"rank", "received", "expected"} in frames; frame 0 of a collective is its description
//     "wait"              what it waits for, or failed on: {"rank", "frame" (null: not counted), "doing", "since_s"};
//                         null if it does not wait
//     "sent_bytes", "received_bytes"   by this rank up to now, frame headers included
//     "queued_s", "started_s", "ended_s"   null if it has not got so far
//     "error"             of one that failed, else null
// Ranks in an op are the group's. The text is UTF-8; bytes of a message that are not stand as U+FFFD.
class FlightRecord {
 public:
  // Records the last `entries` ops; 0 records nothing. `folder` is where write() puts the file; empty means the
  // system's temporary folder.
  FlightRecord(const GroupContext& group, size_t entries, std::string folder);

  // Takes down one that is issued; null where nothing is recorded. Over `entries` the oldest that has ended leaves,
  // then the oldest that waits in the queue: what is under way is what a reader looks for.
  std::shared_ptr<OpProgress> add(const std::string& op, uint32_t sequence);

  std::string json(const std::string& because = "") const;

  // Writes json() to a file of its own name (lowcomm-flight-<group>-rank<r>-pid<p>-epoch<e>.json), whole or not at all.
  // Returns what an error adds about it: "; flight record: <path>", or why the file could not be written; empty if
  // nothing is recorded. Never throws.
  std::string write(const std::string& because) noexcept;

  // The text that the last write() returned.
  std::string named() const;

 private:
  std::string put(const std::string& because) const noexcept;
  std::string path() const;

  const GroupContext& group_;
  const size_t entries_;
  const std::string folder_;
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<OpProgress>> ops_;
  std::string named_;
};

}  // namespace lowcomm

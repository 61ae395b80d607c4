#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "collective/progress.h"
#include "collective/send_window.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {

// Frame buffers of one group, reused: fresh memory would cost a page fault every 4 KiB. Thread-safe. A buffer goes back
// when its handle is dropped; trimAfter() frees it then, but one that went back by an exception is never freed before
// the pool, so a transfer that outlives a failed op writes into memory that is still there.
class BufferPool {
 public:
  // `capacity`: bytes that any frame of the group fits in.
  explicit BufferPool(size_t capacity) : capacity_(capacity) {}
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  struct Return {
    BufferPool* pool = nullptr;
    size_t bytes = 0;
    void operator()(std::byte* buffer) const { pool->give(buffer, bytes); }
  };
  using Buffer = std::unique_ptr<std::byte[], Return>;

  size_t capacity() const { return capacity_; }

  // A buffer of capacity() bytes, or of `bytes` or a little more: sizes are rounded up to whole pages and a quarter of
  // a power of two, so that few sizes are kept apart.
  Buffer take() { return take(capacity_); }
  Buffer take(size_t bytes);
  static std::span<std::byte> span(const Buffer& buffer) { return {buffer.get(), buffer.get_deleter().bytes}; }

  // Bytes of all buffers, those taken and those that lie idle.
  size_t held();

  // Frees what lies idle beyond kKeptBytes, after a message that took more than that: one between two ranks takes as
  // many buffers as it has frames.
  void trimAfter(size_t bytes);
  static constexpr size_t kKeptBytes = 8 << 20;

 private:
  // Of one size.
  struct Idle {
    std::vector<std::byte*> buffers, risky;  // risky: went back by an exception
  };
  void give(std::byte* buffer, size_t bytes);

  const size_t capacity_;
  std::mutex mutex_;
  std::unordered_map<std::byte*, size_t> all_;  // with their sizes
  std::map<size_t, Idle> idle_;                 // by size
};

// What a group is made with. Epoch, chunk_bytes, connections and ring_from are agreed by its ranks.
struct GroupConfig {
  std::string group = "default";
  std::vector<int> global_ranks;               // by group rank; empty: not shown in messages
  uint32_t epoch = 0;                          // frames of another one are refused
  size_t chunk_bytes = 256 << 10;              // payload of a full frame
  int connections = 1;                         // to every peer, for bulk: frames take them in turn
  int ring_from = 0;                           // an all_gather of so many ranks goes around a ring; 0: none does
  std::chrono::milliseconds timeout{1800000};  // progress deadline
  size_t flight_record = 0;                    // ops that the flight record holds; each rank's own affair
  std::string flight_folder;                   // where it is written; empty: the system's for temporary files
};

// What every op of a group shares.
struct GroupContext {
  GroupContext(Transport& transport, GroupConfig config);

  Transport& transport;
  const std::string name;
  const std::vector<int> global_ranks;  // by group rank; for messages
  const uint32_t epoch;
  const size_t chunk_bytes;  // payload bytes of a full frame
  const int connections;     // to every peer over the bulk lane: a transfer's tag, modulo this, picks one
  const int ring_from;
  std::atomic<std::chrono::milliseconds::rep> timeout_ms;  // progress deadline: no frame for this long is a fault
  BufferPool frames;
  std::vector<std::byte> accumulator, scaled;  // scratch of the worker's reductions, kept from op to op
  SendWindow window;                           // the worker's

  int rank() const { return transport.rank(); }
  int size() const { return transport.size(); }
  std::string rankName(int rank) const;  // "rank 1 (global 5)"
};

// What encoding lost, in squares: of ||decoded - x|| and ||x||.
struct Loss {
  double lost = 0, whole = 0;

  bool taken() const { return whole > 0; }
};

// What one op moved and where its time went.
struct OpCounters {
  uint64_t raw_bytes = 0;   // what this rank would send without a codec, headers aside
  uint64_t wire_bytes = 0;  // sent by this rank, frame headers included
  uint64_t received_bytes = 0;
  // Of tensors on a device: what was copied between it and the host, codes or values.
  uint64_t device_to_host_bytes = 0, host_to_device_bytes = 0;
  std::chrono::nanoseconds encode{0}, wait{0}, decode{0};
  std::vector<std::chrono::nanoseconds> wait_by_peer;  // `wait` by rank; empty where nothing was waited for
  Loss loss;                                           // of a sample of what this rank encoded
};

// What an op spends its time on.
enum class Doing : uint8_t { encode, wait, decode };

// A stretch of an op's time, for a profiler.
struct Stretch {
  Doing doing;
  std::chrono::steady_clock::time_point start, end;
};
using Timeline = std::vector<Stretch>;

// A transfer with a peer failed, as against what came in it.
struct TransferError : PeerError {
  TransferError(const std::string& what, int peer, TransportError::Kind kind) : PeerError(what, peer), kind(kind) {}
  TransportError::Kind kind;
};

// A peer could not send its data, or issued another op than this rank (a caller's mistake). The conversation stayed
// whole: the op failed, the group did not.
struct PeerRefused : PeerError {
  using PeerError::PeerError;
};

inline constexpr size_t kMaxErrorText = 1024;  // of an error frame

// One op in progress, on the group's worker or beside it.
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

  // Header of a frame of this op: sequence and epoch filled in.
  FrameHeader header(FrameKind kind) const;

  // Waits under the progress deadline; a failure becomes a TransferError that carries the whole story. `doing` is a
  // literal; `frame` the frame's number, where it is a frame (OpProgress::Wait).
  void wait(Transfer& transfer, int peer, const char* doing, std::optional<uint32_t> frame = std::nullopt);

  // Adds to the counter of what was done, and to the timeline.
  void spent(Doing doing, Clock::time_point start, Clock::time_point end);

  // What the flight record is to know of the op from now on; `change` gets an OpProgress::State.
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

  // What this rank's error frames say of why it cannot send.
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

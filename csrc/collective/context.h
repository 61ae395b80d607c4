#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collective/link_shares.h"
#include "collective/op_context.h"
#include "transport/transport.h"

namespace lowcomm {

// How many rounds of an exchange a rank sends ahead of those that have come. Too few leave a link with a long delay
// idle: one frame answers another. Too many do not fit the queue where several flows meet, and what does not is lost
// and sent again. So a group begins with few, and tries twice as many when what comes tells of idle time: waits of a
// full link are equally long, those of an idle one are a long one for each window, which the rest of it follows at the
// link's rate. More is kept if more came of it, as it does of a delay; flows that disturb each other look idle too, and
// gain nothing. What was learnt stays with the group: its links stay.
class SendWindow {
 public:
  static constexpr size_t kMost = 16;  // half of a short encoded message's frames (collective/plan.h)

  // Several peers' flows share this rank's link.
  explicit SendWindow(int peers) : rounds_(peers > 1 ? 2 : 4) {}

  size_t rounds() const { return rounds_; }

  // The time that a round's frames were waited for, and their bytes; not of an op's first, which waits for peers that
  // are late.
  void waited(std::chrono::nanoseconds time, uint64_t bytes);

 private:
  static constexpr size_t kSeen = 8;  // rounds that are looked at together
  static constexpr size_t kRest = 8;  // times that many until it is tried again, twice as long after every failure

  bool idle(std::chrono::nanoseconds sum);
  void judge(double rate);

  size_t rounds_;
  size_t tried_from_ = 0;  // what a trial began with; 0: none
  bool settling_ = false;  // what comes was still sent before the trial
  double rate_before_ = 0;
  size_t rest_ = 0, next_rest_ = kRest;
  size_t seen_ = 0;
  uint64_t bytes_ = 0;
  std::array<std::chrono::nanoseconds, kSeen> times_{};
};

// Frame buffers of one group, reused: fresh memory would cost a page fault every 4 KiB. Thread-safe. A buffer goes back
// when its handle is dropped, and may then be freed by trim(). One that went back by an exception is not freed before
// the pool, so a transfer that outlives a failed op writes into memory that is still there. Nobody else drops a handle
// whose transfer is under way.
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

  // Frees idle buffers that are not likely to be taken soon. Call it when an op or a message has ended: it has taken as
  // many buffers as it has frames under way. A large message's buffers are freed at once, except for kKeptBytes. If
  // buffers are allocated again within kLately ops and messages, as many bytes stay idle from then on, at most
  // kMostKeptBytes: a training exchanges in the next step what it exchanged in the last. Bytes that stay idle for
  // kLately ops and messages are freed again. Buffers of the size that was unused for the longest time are freed first.
  void trim() noexcept;
  static constexpr size_t kLately = 32;
  static constexpr size_t kKeptBytes = 8 << 20, kMostKeptBytes = 256 << 20;

 private:
  struct Allocation {
    size_t bytes;
    bool risky;  // it went back by an exception once
  };
  // Idle buffers of one size.
  struct Idle {
    std::vector<std::byte*> buffers, risky;
    size_t least = 0;         // of `buffers`, since trim() last counted to kLately
    uint64_t last_taken = 0;  // by count of all that were taken
  };
  void give(std::byte* buffer, size_t bytes);
  void missed(size_t bytes);
  void adapt();
  std::pair<std::byte*, size_t> surplus();

  const size_t capacity_;
  std::mutex mutex_;
  std::unordered_map<std::byte*, Allocation> all_;
  std::map<size_t, Idle> idle_;  // by size
  uint64_t takes_ = 0;
  size_t held_ = 0, idle_bytes_ = 0;     // of all; of those that trim() may free
  size_t kept_ = kKeptBytes;             // that trim() lets lie idle
  std::array<size_t, 2> freed_bytes_{};  // and not made anew: since then, and in the time before
  size_t ended_ = 0;                     // ops and messages since then
};

// A frame of this rank, perhaps under way to one or more peers.
struct OutgoingFrame {
  struct Way {
    int peer;
    uint32_t number;  // of the frame, among those to this peer
    std::shared_ptr<Transfer> transfer;
  };
  BufferPool::Buffer buffer;
  std::vector<Way> sending;
};

// Frames that the transport has and that have yet to arrive, of ops and messages that are over: to wait for them would
// cost each op a round trip more. Those that have arrived are given back with the next op or message. Where one is lost
// the next op with the peer fails. Thread-safe.
class LeavingFrames {
 public:
  // Bytes of memory for each peer, four frames of 256 KiB and a page more each. A frame that goes to several peers
  // counts for each of them.
  static constexpr size_t kMost = 1088 << 10;

  // Takes the frames if there is room for all of them, next to those that it has and that have not arrived.
  bool take(std::vector<OutgoingFrame>& frames);

  // Waits until those that it has have arrived, each under the progress deadline. Throws TransferError.
  void settle(OpContext& op);

  // Waits until all have arrived or are lost, as long as one does within `patience` of the one before; returns the
  // peers for which one has not, ascending. From the first call on none is taken.
  std::vector<int> flush(std::chrono::milliseconds patience);

 private:
  struct Leaving {
    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<BufferPool::Buffer> buffer;  // of all ways of the frame
    size_t bytes;
  };
  struct ToPeer {
    std::deque<Leaving> frames;  // in the order that they were sent in
    size_t bytes = 0;            // of their buffers
  };

  void forget(std::vector<Leaving>& arrived);
  std::map<int, ToPeer> copy();

  std::mutex mutex_;
  std::map<int, ToPeer> peers_;
  bool is_closing_ = false;
};

// The options of a group. Epoch, chunk_bytes and connections are agreed by its ranks.
struct GroupConfig {
  std::string group = "default";
  std::vector<int> global_ranks;               // by group rank; empty: not shown in messages
  uint32_t epoch = 0;                          // frames of another one are refused
  size_t chunk_bytes = 256 << 10;              // payload of a full frame
  int connections = 1;                         // to every peer, for bulk: frames take them in turn
  bool equal_slices = false;                   // of all_reduces, also where links are of unequal speed (LinkShares)
  std::chrono::milliseconds timeout{1800000};  // progress deadline
  size_t flight_record = 0;                    // ops that the flight record holds; each rank's own affair
  std::string flight_folder;                   // where it is written; empty: the system's for temporary files
};

// A group: shared by its ops.
struct GroupContext {
  GroupContext(Transport& transport, GroupConfig config);

  Transport& transport;
  const std::string name;
  const std::vector<int> global_ranks;  // by group rank; for messages
  const uint32_t epoch;
  const size_t chunk_bytes;  // payload bytes of a full frame
  const int connections;     // to every peer over the bulk lane: a transfer's tag, modulo this, picks one
  std::atomic<std::chrono::milliseconds::rep> timeout_ms;  // progress deadline: no frame for this long is a fault
  BufferPool frames;
  LeavingFrames leaving;
  std::vector<std::byte> accumulator, scaled;  // scratch of the worker's reductions, kept from op to op
  SendWindow window;                           // the worker's
  LinkShares links;                            // the worker's

  int rank() const { return transport.rank(); }
  int size() const { return transport.size(); }

  std::string rankName(int rank) const;  // "rank 1 (global 5)"
};

// A transfer with a peer failed, as against what came in it.
struct TransferError : PeerError {
  TransferError(const std::string& what, int peer, TransportError::Kind kind) : PeerError(what, peer), kind(kind) {}
  TransportError::Kind kind;
};

}  // namespace lowcomm

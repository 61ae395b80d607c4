#include "collective/context.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <exception>
#include <new>
#include <utility>

#include "base/error.h"
#include "collective/plan.h"

namespace lowcomm {
namespace {

// Pages of their own, which go back to the system wherever they lie; a heap keeps what lies under something in use.
std::byte* newPages(size_t bytes) {
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(pages);
}

}  // namespace

BufferPool::~BufferPool() {
  for (const auto& [buffer, bytes] : all_)
    ::munmap(buffer, bytes);
}

BufferPool::Buffer BufferPool::take(size_t bytes) {
  constexpr size_t kPage = 4096;
  const size_t granule = std::max(kPage, std::bit_floor(bytes) / 4);
  if (bytes != capacity_) bytes = (bytes + granule - 1) / granule * granule;
  std::lock_guard<std::mutex> lock(mutex_);
  Idle& idle = idle_[bytes];
  std::vector<std::byte*>& from = idle.buffers.empty() ? idle.risky : idle.buffers;
  if (from.empty()) {
    std::byte* fresh = newPages(bytes);
    all_.emplace(fresh, bytes);
    return Buffer(fresh, Return{this, bytes});
  }
  std::byte* buffer = from.back();
  from.pop_back();
  return Buffer(buffer, Return{this, bytes});
}

size_t BufferPool::held() {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t held = 0;
  for (const auto& [buffer, bytes] : all_)
    held += bytes;
  return held;
}

void BufferPool::give(std::byte* buffer, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Idle& idle = idle_[bytes];
  (std::uncaught_exceptions() > 0 ? idle.risky : idle.buffers).push_back(buffer);
}

void BufferPool::trimAfter(size_t bytes) {
  if (bytes <= kKeptBytes) return;
  std::lock_guard<std::mutex> lock(mutex_);
  size_t kept = 0;
  for (auto& [size, idle] : idle_) {
    for (; !idle.buffers.empty() && kept + idle.buffers.size() * size > kKeptBytes; idle.buffers.pop_back()) {
      all_.erase(idle.buffers.back());
      ::munmap(idle.buffers.back(), size);
    }
    kept += idle.buffers.size() * size;
  }
}

GroupContext::GroupContext(Transport& transport, GroupConfig config)
    : transport(transport),
      name(std::move(config.group)),
      global_ranks(std::move(config.global_ranks)),
      epoch(config.epoch),
      chunk_bytes(config.chunk_bytes),
      connections(config.connections),
      ring_from(config.ring_from),
      timeout_ms(config.timeout.count()),
      frames(frameCapacity(config.chunk_bytes)),
      window(transport.size() - 1) {}

std::string GroupContext::rankName(int rank) const {
  std::string name = "rank " + std::to_string(rank);
  if (rank >= 0 && static_cast<size_t>(rank) < global_ranks.size()) {
    name += " (global " + std::to_string(global_ranks[rank]) + ")";
  }
  return name;
}

FrameHeader OpContext::header(FrameKind kind) const {
  FrameHeader header;
  header.kind = kind;
  header.sequence = sequence;
  header.epoch = group.epoch;
  return header;
}

void OpContext::wait(Transfer& transfer, int peer, const char* doing, std::optional<uint32_t> frame) {
  const auto since = Clock::now();
  note([&](OpProgress::State& state) {
    state.wait = {peer, frame, doing, since};
    state.sent_bytes = counters.wire_bytes;
    state.received_bytes = counters.received_bytes;
  });
  const auto waited = [&] {
    const auto now = Clock::now();
    spent(Doing::wait, since, now);
    counters.wait_by_peer.resize(group.size());
    counters.wait_by_peer[peer] += now - since;
  };
  try {
    transfer.wait(std::chrono::milliseconds(group.timeout_ms.load()));
  } catch (const TransportError& error) {
    waited();
    fail(peer, error, doing);  // what it waited for stays in the record
  }
  waited();
  note([](OpProgress::State& state) { state.wait.reset(); });
}

void OpContext::spent(Doing doing, Clock::time_point start, Clock::time_point end) {
  (doing == Doing::encode ? counters.encode : doing == Doing::wait ? counters.wait : counters.decode) += end - start;
  if (timeline) timeline->push_back({doing, start, end});
}

std::string OpContext::refusal(const ValueError& mistake) const {
  return (group.rankName(group.rank()) + ": " + mistake.what()).substr(0, kMaxErrorText);
}

std::exception_ptr OpContext::differs(int peer, const std::string& difference) const {
  return refusedBecause(peer, "ranks issued different ops: " + difference);
}

std::exception_ptr OpContext::refusedBecause(int peer, const std::string& why) const {
  return std::make_exception_ptr(PeerRefused(story(peer, why), peer));
}

void OpContext::refused(int peer, const std::string& why) const {
  throw PeerRefused("lowcomm: " + op +
                    " failed, a rank could not send its part: " + (why.empty() ? "it gave no reason" : why) + " [op " +
                    op + ", sequence " + std::to_string(sequence) + ", group " + group.name + ", told by " +
                    group.rankName(peer) + " to " + group.rankName(group.rank()) + "]");
}

void OpContext::fail(int peer, const std::string& why) const {
  throw PeerError(story(peer, why), peer);
}

void OpContext::fail(int peer, const TransportError& error, const char* doing) const {
  note([&](OpProgress::State& state) {
    if (!state.wait) state.wait = {peer, std::nullopt, doing, Clock::now()};  // it failed before there was a wait
  });
  throw TransferError(story(peer, std::string(doing) + ": " + error.what()), peer, error.kind);
}

std::string OpContext::story(int peer, const std::string& why) const {
  const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3f", elapsed);
  return "lowcomm: " + op + " failed between " + group.rankName(group.rank()) + " and " + group.rankName(peer) + ": " +
         why + " [op " + op + ", sequence " + std::to_string(sequence) + ", group " + group.name + ", bytes sent " +
         std::to_string(counters.wire_bytes) + ", bytes received " + std::to_string(counters.received_bytes) +
         ", elapsed " + seconds + " s, progress deadline " + std::to_string(group.timeout_ms.load()) + " ms]";
}

}  // namespace lowcomm

#include "collective/context.h"

#include <cstdio>
#include <new>
#include <utility>

#include "codec/error.h"
#include "collective/plan.h"

namespace lowcomm {
namespace {
constexpr std::align_val_t kAlignment{64};
}

BufferPool::~BufferPool() {
  for (std::byte* buffer : all_)
    ::operator delete[](buffer, kAlignment);
}

BufferPool::Buffer BufferPool::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (idle_.empty()) {
    all_.push_back(static_cast<std::byte*>(::operator new[](capacity_, kAlignment)));
    idle_.push_back(all_.back());
  }
  std::byte* buffer = idle_.back();
  idle_.pop_back();
  return Buffer(buffer, Return{this});
}

void BufferPool::give(std::byte* buffer) {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(buffer);
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
  return std::make_exception_ptr(PeerRefused(story(peer, "ranks issued different ops: " + difference), peer));
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

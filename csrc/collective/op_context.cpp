#include "collective/op_context.h"

#include <cstdio>

#include "collective/context.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {

int OpContext::rank() const {
  return group.rank();
}

int OpContext::size() const {
  return group.size();
}

size_t OpContext::chunkBytes() const {
  return group.chunk_bytes;
}

FrameHeader OpContext::header(FrameKind kind) const {
  FrameHeader header;
  header.kind = kind;
  header.sequence = sequence;
  header.epoch = group.epoch;
  return header;
}

void OpContext::wait(Transfer& transfer, int peer, const char* doing, std::optional<uint32_t> frame,
                     std::optional<std::chrono::milliseconds> deadline) {
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
    if (peer >= 0) counters.wait_by_peer[peer] += now - since;
  };
  try {
    transfer.wait(deadline.value_or(std::chrono::milliseconds(group.timeout_ms.load())));
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
  return std::make_exception_ptr(PeerRefusal(story(peer, why), peer));
}

void OpContext::refused(int peer, const std::string& why) const {
  throw PeerRefusal("lowcomm: " + op +
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

#include "collective/op_context.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <string_view>

#include "collective/context.h"
#include "wire/frame.h"

namespace lowcomm {

OpContext::OpContext(GroupContext& group, std::string op, uint32_t sequence)
    : group(group), op(std::move(op)), sequence(sequence), first_tag(firstTag(sequence)), start(Clock::now()) {}

uint32_t OpContext::firstTag(uint32_t sequence) {
  return sequence % kTaggedOps * kOpTags;
}

int OpContext::rank() const {
  return group.rank();
}

int OpContext::size() const {
  return group.size();
}

size_t OpContext::chunkBytes() const {
  return group.chunk_bytes;
}

const std::vector<uint64_t>& OpContext::sliceWeights() const {
  return group.links.weights();
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
    const auto patience = deadline.value_or(std::chrono::milliseconds(group.timeout_ms.load()));
    const bool is_receive = std::string_view(doing).starts_with("waiting for");
    if (is_receive && is_numbered_alike) {
      receive(transfer, peer, patience);
    } else {
      transfer.wait(patience);
    }
  } catch (const TransportError& error) {
    waited();
    fail(peer, error, doing);  // what it waited for stays in the record
  }
  waited();
  note([](OpProgress::State& state) { state.wait.reset(); });
}

void OpContext::met(int peer) {
  met_.resize(group.size());
  met_[peer] = true;
}

// Ops that ranks number differently have no tag in common and would wait in silence, so a wait for a frame that is long
// looks for the first message of another op from its sender, unless the sender has described this one. First messages
// of ops come in order. Twice in a row: the one of this op may have come in between.
void OpContext::receive(Transfer& transfer, int peer, std::chrono::milliseconds deadline) const {
  constexpr std::chrono::milliseconds kLook{1000};
  if (deadline <= kLook) return transfer.wait(deadline);
  const auto end = Clock::now() + deadline;
  for (std::optional<uint32_t> other;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    try {
      return transfer.wait(std::clamp(left, std::chrono::milliseconds(1), kLook));
    } catch (const TransportError& error) {
      if (error.kind != TransportError::Kind::timed_out) throw;
      if (left <= kLook) {
        throw TransportError(error.kind, peer,
                             "Timed out waiting " + std::to_string(deadline.count()) + "ms for the message");
      }
    }
    const std::optional<uint32_t> before = std::exchange(other, otherOpOf(peer));
    if (other && before == other)
      fail(peer, "sequence: expected " + std::to_string(sequence) + ", got " + std::to_string(*other));
  }
}

// The number of another op that `peer` has sent frames of.
std::optional<uint32_t> OpContext::otherOpOf(int peer) const {
  if (!met_.empty() && met_[peer]) return {};
  for (const Lane lane : {Lane::bulk, Lane::control}) {
    const uint32_t first = lane == Lane::bulk ? 0 : kOpTags;  // there are others than ops' on the control lane
    const auto tag = group.transport.unclaimed(lane, peer, first, kTaggedOps * kOpTags);
    if (!tag || *tag % kOpTags != 0 || *tag / kOpTags == first_tag / kOpTags) continue;
    constexpr int kUnknownBits = 32 - std::countr_zero(kTaggedOps);  // of the number: it is the nearest to this op's
    const uint32_t ahead = (*tag / kOpTags - first_tag / kOpTags) << kUnknownBits;
    return sequence + static_cast<uint32_t>(static_cast<int32_t>(ahead) >> kUnknownBits);
  }
  return {};
}

void OpContext::noteFailure(const std::string& why) const {
  note([&](OpProgress::State& state) {
    state.sent_bytes = counters.wire_bytes;
    state.received_bytes = counters.received_bytes;
    state.end(why);
  });
}

void OpContext::spent(Doing doing, Clock::time_point start, Clock::time_point end) {
  (doing == Doing::encode ? counters.encode : doing == Doing::wait ? counters.wait : counters.decode) += end - start;
  if (timeline) timeline->push_back({doing, start, end});
}

std::string OpContext::refusal(const ValueError& mistake) const {
  return beginningOf(group.rankName(group.rank()) + ": " + mistake.what(), kMaxErrorText);
}

std::exception_ptr OpContext::differs(int peer, const std::string& difference) const {
  return refusedBecause(peer, "ranks issued different ops: " + difference);
}

std::exception_ptr OpContext::refusedBecause(int peer, const std::string& why) const {
  return std::make_exception_ptr(PeerRefusal(story(peer, why), peer));
}

void OpContext::refused(int peer, const std::string& why) const {
  const std::string reason = why.empty() ? "it gave no reason" : why;
  throw PeerRefusal(story(peer, group.rankName(peer) + " could not send its part: " + reason), peer);
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
  return "lowcomm: " + op + " failed between " + group.rankName(group.rank()) + " and " + group.rankName(peer) + ": " +
         why + numbers();
}

std::string OpContext::numbers() const {
  const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3f", elapsed);
  return " [op " + op + ", sequence " + std::to_string(sequence) + ", group " + group.name + ", bytes sent " +
         std::to_string(counters.wire_bytes) + ", bytes received " + std::to_string(counters.received_bytes) +
         ", elapsed " + seconds + " s, progress deadline " + std::to_string(group.timeout_ms.load()) + " ms]";
}

}  // namespace lowcomm

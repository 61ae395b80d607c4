#include "collective/exchange.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <tuple>

#include "base/error.h"
#include "collective/context.h"
#include "collective/conversation.h"
#include "collective/descriptions.h"
#include "collective/plan.h"
#include "wire/frame.h"

namespace lowcomm {

namespace {

constexpr uint64_t kMuch = 256 << 10;  // bytes to each peer, on average, after which links are measured

class Runner {
 public:
  Runner(OpContext& op, const Exchange& exchange)
      : op_(op),
        group_(op.group),
        rank_(op.rank()),
        size_(op.size()),
        rounds_(roundsOf(exchange.phases)),
        ahead_(roundsAhead(exchange.phases, rank_)),
        measures_(exchange.cut_by_links),
        conversation_(op, ahead_),
        descriptions_(op, exchange, conversation_) {}

  // A description to and from every peer, then the rounds: one is sent where there is room in the window and its data
  // is there, else the oldest one that is under way is finished.
  void run() {
    op_.conversing = true;
    descriptions_.record();
    for (int d = 1; d < size_; ++d) {
      const int peer = conversation_.from(d);
      conversation_.postDescription(peer);
      for (size_t r = 0; r < std::min(ahead_, rounds_.size()); ++r)
        post(peer, r);
    }
    descriptions_.send();
    size_t sent = 0;
    while (finished_ < rounds_.size()) {
      if (sent < rounds_.size() && sent < finished_ + window() && rounds_[sent].needs <= finished_) {
        sendRound(sent++);
      } else {
        if (finished_ == 0) compareDescriptions();
        finishRound(finished_++);
      }
    }
    if (rounds_.empty()) compareDescriptions();
    conversation_.leave(descriptions_.release());
    if (measures_ && op_.counters.wire_bytes >= kMuch * (size_ - 1) && group_.links.isDue())
      group_.links.measure(group_.transport.report());
    op_.conversing = false;
    if (own_error_) std::rethrow_exception(own_error_);
    if (refused_) op_.refused(*refused_, reason_);
  }

 private:
  size_t window() const { return std::min(group_.window.rounds(), ahead_); }

  // The message whose frame travels to or from `peer` in a round; null where none does.
  const MessagePlan* carried(const std::vector<const MessagePlan*>& messages, int peer, const Round& round) const {
    const MessagePlan* message = descriptions_.differs(peer) ? nullptr : messages[peer];
    return message && round.k < message->frames.size() ? message : nullptr;
  }
  const MessagePlan* outgoing(int peer, const Round& round) const { return carried(round.phase->out, peer, round); }
  const MessagePlan* incoming(int peer, const Round& round) const { return carried(round.phase->in, peer, round); }

  // The message that a round sends to all peers and that this rank keeps too; null if the round has none.
  const MessagePlan* sameToAll(const Round& round) const {
    return round.phase->same_to_all ? outgoing(rank_, round) : nullptr;
  }

  // Posts the receive of round r from `peer`, if it has one.
  void post(int peer, size_t r) {
    if (incoming(peer, rounds_[r])) conversation_.post(peer, r);
  }

  void compareDescriptions() {
    const auto difference = descriptions_.compare();
    if (!difference) return;
    own_error_ = op_.differs(difference->peer, difference->text);
    reason_ = beginningOf(group_.rankName(rank_) + ": " + difference->text, kMaxErrorText);
    descriptions_.part(reason_);  // ranks that agree with this one get error frames, as when it cannot encode
  }

  void sendRound(size_t r) {
    const Round& round = rounds_[r];
    const bool same = round.phase->same_to_all;
    // The rounds two windows before this one are over, and their frames have left or are about to. If they kept their
    // buffers, there would be as many as the largest window takes.
    const size_t behind = std::min(2 * window(), ahead_);
    if (r >= behind) conversation_.giveBackBefore(r - behind + 1);
    auto& frames = conversation_.outgoing(r, same ? 1 : static_cast<size_t>(size_ - 1));
    // Every peer's frame is encoded before any is sent: a rank that finds a NaN tells all of them in the same round.
    if (!gaveUp()) encodeRound(r, frames);
    size_t bytes = 0;
    for (int d = 1; d < size_; ++d) {
      const int peer = conversation_.to(d);
      const MessagePlan* message = outgoing(peer, round);
      if (!message) continue;
      OutgoingFrame& frame = frames[same ? 0 : d - 1];
      if (!same || bytes == 0) bytes = seal(frame, *message, round);
      conversation_.send(frame, peer, bytes);
    }
  }

  void encodeRound(size_t r, std::vector<OutgoingFrame>& frames) {
    Stopwatch watch(op_, Doing::encode);
    const Round& round = rounds_[r];
    const auto encode = [&](OutgoingFrame& frame, int peer, const MessagePlan& message) {
      const size_t bytes = message.frames[round.k].payload_bytes;
      std::byte* const payload = conversation_.memoryOf(frame, roomFor(bytes)) + kFrameHeaderBytes;
      round.phase->encode(round.k, peer, {payload, bytes});
    };
    try {
      startRounds(r);
      round.phase->check(round.k);
      if (round.phase->same_to_all) {
        if (const MessagePlan* message = sameToAll(round)) encode(frames[0], rank_, *message);
        return;
      }
      for (int d = 1; d < size_; ++d) {
        const int peer = conversation_.to(d);
        if (const MessagePlan* message = outgoing(peer, round)) encode(frames[d - 1], peer, *message);
      }
    } catch (const ValueError& error) {
      giveUp(error);
    }
  }

  // Round r, and the next one where its data is there: a device makes that one's frames while the host waits for these.
  void startRounds(size_t r) {
    for (; started_ < rounds_.size() && started_ <= r + 1 && rounds_[started_].needs <= finished_; ++started_)
      rounds_[started_].phase->start(rounds_[started_].k);
  }

  // The header in front of an encoded payload, or an error frame. Returns the frame's bytes.
  size_t seal(OutgoingFrame& frame, const MessagePlan& message, const Round& round) {
    if (gaveUp()) return sealText(conversation_.memoryOf(frame, roomFor(0)), op_.header(FrameKind::error), reason_);
    Stopwatch watch(op_, Doing::encode);
    const FrameHeader header = dataHeader(message, round);
    const size_t bytes = kFrameHeaderBytes + header.payload_bytes;
    sealFrame({frame.buffer.get(), bytes}, header);
    return bytes;
  }

  FrameHeader dataHeader(const MessagePlan& message, const Round& round) const {
    FrameHeader header = message.header(message.frames[round.k]);
    header.sequence = op_.sequence;
    header.epoch = group_.epoch;
    return header;
  }

  void finishRound(size_t r) {
    const Round& round = rounds_[r];
    const auto waited = op_.counters.wait;
    const uint64_t received = op_.counters.received_bytes;
    Payloads payloads(size_);
    for (int d = 1; d < size_; ++d) {
      const int peer = conversation_.from(d);
      const MessagePlan* message = incoming(peer, round);
      if (message) payloads[peer] = takeFrame(peer, *message, r);
    }
    if (const uint64_t came = op_.counters.received_bytes - received; r > 0 && came > 0 && !gaveUp()) {
      group_.window.waited(op_.counters.wait - waited, came);
    }
    if (!gaveUp()) absorbRound(r, payloads);
    if (r + ahead_ < rounds_.size()) {
      for (int d = 1; d < size_; ++d)
        post(conversation_.from(d), r + ahead_);
    }
  }

  // The payload of round r's frame from `peer`; of an error frame its text.
  std::span<const std::byte> takeFrame(int peer, const MessagePlan& message, size_t r) {
    const std::span<const std::byte> bytes = conversation_.take(peer, r);
    Stopwatch watch(op_, Doing::decode);
    std::span<const std::byte> payload;
    op_.attribute(peer, [&] {
      const FrameHeader got = openFrame(bytes);
      op_.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
      payload = framePayload(bytes, got);
      if (got.kind == FrameKind::error && got.sequence == op_.sequence && got.epoch == group_.epoch) {
        noteRefusal(peer, payload);
      } else {
        expectFrame(got, dataHeader(message, rounds_[r]));
      }
    });
    return payload;
  }

  void absorbRound(size_t r, Payloads& payloads) {
    Stopwatch watch(op_, Doing::decode);
    const Round& round = rounds_[r];
    if (const MessagePlan* message = sameToAll(round)) {
      const std::byte* payload = conversation_.outgoing(r, 1)[0].buffer.get() + kFrameHeaderBytes;
      payloads[rank_] = {payload, message->frames[round.k].payload_bytes};
    }
    try {
      round.phase->absorb(round.k, payloads);
    } catch (const ValueError& error) {
      giveUp(error);
    }
  }

  // Whether the rest of this rank's frames are error frames, and frames that still come are only received.
  bool gaveUp() const { return own_error_ || refused_; }

  // In a catch block: this rank's data cannot be sent.
  void giveUp(const ValueError& error) {
    own_error_ = std::current_exception();
    reason_ = op_.refusal(error);
  }

  // A peer gave up: the frames that this rank still has to send are of no use, so it gives up too, in small frames.
  void noteRefusal(int peer, std::span<const std::byte> text) {
    if (gaveUp()) return;
    refused_ = peer;
    reason_.assign(reinterpret_cast<const char*>(text.data()), std::min(text.size(), kMaxErrorText));
  }

  OpContext& op_;
  GroupContext& group_;
  const int rank_, size_;
  const std::vector<Round> rounds_;
  const size_t ahead_;  // rounds that receives are posted for
  const bool measures_;
  size_t started_ = 0, finished_ = 0;  // rounds
  Conversation conversation_;
  Descriptions descriptions_;
  std::exception_ptr own_error_;
  std::optional<int> refused_;  // the peer whose error frame came first
  std::string reason_;          // text of this rank's error frames; a peer's may be empty
};

}  // namespace

void runExchange(OpContext& op, const Exchange& exchange) {
  Runner(op, exchange).run();
}

namespace {

constexpr size_t kFewestAhead = 4;

using Direction = std::vector<const MessagePlan*> Phase::*;

size_t aheadOf(const std::vector<Phase*>& phases, Direction direction, int peer) {
  size_t all = 0, longest = 0, largest = 1;
  for (const Phase* phase : phases) {
    const MessagePlan* plan = (phase->*direction)[peer];
    if (!plan) continue;
    size_t message = 0;
    for (const Frame& frame : plan->frames) {
      message += frame.payload_bytes;
      largest = std::max<size_t>(largest, frame.payload_bytes);
    }
    all += message;
    longest = std::max(longest, message);
  }
  return std::max(longest, all / 2) / (2 * largest);
}

}  // namespace

size_t Phase::rounds() const {
  size_t most = 0;
  for (const auto* messages : {&out, &in}) {
    for (const MessagePlan* message : *messages)
      most = std::max(most, message ? message->frames.size() : 0);
  }
  return most;
}

std::vector<const MessagePlan*> onlyFor(int rank, int ranks, const MessagePlan* plan) {
  std::vector<const MessagePlan*> messages(ranks, nullptr);
  messages[rank] = plan;
  return messages;
}

std::vector<Round> roundsOf(const std::vector<Phase*>& phases) {
  std::vector<std::tuple<size_t, size_t, size_t, size_t>> order;  // phases that take turns, turn, phase, round
  size_t together = 0;
  for (size_t p = 0; p < phases.size(); ++p) {
    const bool takes_turns = phases[p]->takes_turns;
    together += takes_turns ? 0 : 1;
    for (size_t k = 0; k < phases[p]->rounds(); ++k)
      order.emplace_back(together, takes_turns ? 2 * k + 3 : 2 * k, p, k);
  }
  std::ranges::sort(order);
  std::vector<Round> rounds;
  std::vector<std::vector<size_t>> places(phases.size());  // in `rounds`, of each phase's
  for (const auto& [of_phases, turn, p, k] : order) {
    const size_t after = phases[p]->readyAfter(k);
    places[p].push_back(rounds.size());
    rounds.push_back({phases[p], k, after > 0 ? places[p - 1][after - 1] + 1 : 0});
  }
  return rounds;
}

size_t roundsAhead(const std::vector<Phase*>& phases, int rank) {
  size_t ahead = kFewestAhead;
  const int peers = phases.empty() ? 0 : static_cast<int>(phases[0]->in.size());
  for (int peer = 0; peer < peers; ++peer) {
    if (peer == rank) continue;
    ahead = std::max({ahead, aheadOf(phases, &Phase::in, peer), aheadOf(phases, &Phase::out, peer)});
  }
  return std::min(ahead, SendWindow::kMost);
}

}  // namespace lowcomm

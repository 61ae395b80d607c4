#include "collective/exchange.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "collective/frame_counts.h"
#include "collective/rounds.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using Buffer = BufferPool::Buffer;

// One peer's side of the conversation: what was posted and what came.
struct Peer {
  std::array<Buffer, SendWindow::kMost> in;
  std::array<std::unique_ptr<Transfer>, SendWindow::kMost> receiving;
  uint32_t sent = 0, received = 0;  // frames, the description among them: what picks the connection
  uint32_t taken = 0;               // of those received, waited for
  Buffer description_in;
  std::unique_ptr<Transfer> describing;
  bool differs = false;  // it describes another op: no frame of a round goes to it or is taken from it
};

// One frame under way to one or more peers.
struct Outgoing {
  struct Way {
    int peer;
    uint32_t number;  // of the frame, among those to this peer
    std::unique_ptr<Transfer> transfer;
  };
  Buffer buffer;
  std::vector<Way> sending;
};

class Runner {
 public:
  Runner(OpContext& op, const Exchange& exchange)
      : op_(op),
        exchange_(exchange),
        group_(op.group),
        rank_(group_.rank()),
        size_(group_.size()),
        peers_(size_),
        rounds_(roundsOf(exchange)),
        ahead_(roundsAhead(exchange, rank_)) {}

  void run() {
    op_.conversing = true;
    op_.note([&](OpProgress::State& state) { announce(state); });
    for (int d = 1; d < size_; ++d) {
      Peer& peer = peers_[from(d)];
      peer.description_in = group_.frames.take();
      peer.describing = receive(from(d), peer.description_in);
      for (size_t r = 0; r < std::min(ahead_, rounds_.size()); ++r)
        post(from(d), r);
    }
    sendDescriptions();
    size_t sent = 0;
    while (finished_ < rounds_.size()) {
      if (sent < rounds_.size() && sent < finished_ + window() && rounds_[sent].needs <= finished_) {
        sendRound(sent++);
      } else {
        if (finished_ == 0) checkDescriptions();
        finishRound(finished_++);
      }
    }
    if (rounds_.empty()) checkDescriptions();
    for (auto& slot : outgoing_) {
      for (Outgoing& frame : slot)
        settle(frame);
    }
    for (Outgoing& frame : descriptions_)
      settle(frame);
    settle(filler_);
    op_.conversing = false;
    if (own_error_) std::rethrow_exception(own_error_);
    if (refused_) op_.refused(*refused_, reason_);
  }

 private:
  // To the flight record: what will be compared, and how many frames will come.
  void announce(OpProgress::State& state) const {
    state.description = exchange_.description.fields;
    state.frames.resize(size_);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      state.frames[peer].expected = 1;  // the description
      for (const Round& round : rounds_)
        state.frames[peer].expected += incoming(peer, round) != nullptr;
    }
  }

  size_t window() const { return std::min(group_.window.rounds(), ahead_); }

  // Waits for the next frame from `peer`.
  void take(Transfer& transfer, int peer, const char* doing) {
    const uint32_t number = peers_[peer].taken++;
    op_.wait(transfer, peer, doing, number);
    op_.note([&](OpProgress::State& state) { state.frames[peer].received = number + 1; });
  }

  int from(int distance) const { return (rank_ - distance + size_) % size_; }
  int to(int distance) const { return (rank_ + distance) % size_; }
  const Phase& phase(const Round& round) const { return exchange_.phases[round.phase]; }

  // The message whose frame travels to or from `peer` in a round; null where none does.
  static const MessagePlan* carried(const std::vector<const MessagePlan*>& messages, int peer, const Round& round) {
    const MessagePlan* message = messages[peer];
    return message && round.k < message->frames.size() ? message : nullptr;
  }
  const MessagePlan* outgoing(int peer, const Round& round) const {
    return peers_[peer].differs ? nullptr : carried(phase(round).out, peer, round);
  }
  const MessagePlan* incoming(int peer, const Round& round) const {
    return peers_[peer].differs ? nullptr : carried(phase(round).in, peer, round);
  }

  // Whether the rest of this rank's frames are error frames, and what still comes is only received.
  bool gaveUp() const { return own_error_ || refused_; }

  uint32_t tagOf(uint32_t frame) const { return frame % static_cast<uint32_t>(group_.connections); }

  std::unique_ptr<Transfer> receive(int peer, const Buffer& buffer) {
    const uint32_t tag = tagOf(peers_[peer].received++);
    return guarded(peer, [&] { return group_.transport.irecv(Lane::bulk, peer, tag, group_.frames.span(buffer)); });
  }

  void send(Outgoing& frame, int peer, size_t bytes) {
    auto data = std::span<const std::byte>(frame.buffer.get(), bytes);
    const uint32_t number = peers_[peer].sent++, tag = tagOf(number);
    frame.sending.push_back(
        {peer, number, guarded(peer, [&] { return group_.transport.isend(Lane::bulk, peer, tag, data); })});
    op_.counters.wire_bytes += bytes;
  }

  template <class F>
  std::unique_ptr<Transfer> guarded(int peer, F&& start) {
    try {
      return start();
    } catch (const TransportError& error) {
      op_.fail(peer, error, "starting a transfer");
    }
  }

  void settle(Outgoing& frame) {
    for (Outgoing::Way& way : frame.sending)
      op_.wait(*way.transfer, way.peer, "sending a frame", way.number);
    frame.sending.clear();
  }

  // Posts the receive of round r from `peer`, if it has one.
  void post(int peer, size_t r) {
    if (!incoming(peer, rounds_[r])) return;
    Peer& p = peers_[peer];
    Buffer& buffer = p.in[r % ahead_];
    if (!buffer) buffer = group_.frames.take();
    p.receiving[r % ahead_] = receive(peer, buffer);
  }

  size_t seal(Buffer& buffer, FrameHeader header) {
    const size_t bytes = kFrameHeaderBytes + header.payload_bytes;
    sealFrame({buffer.get(), bytes}, header);
    return bytes;
  }

  // What is said to `peer` about the op, and is to be heard from it.
  KeyValues descriptionFor(int peer) const {
    KeyValues description = exchange_.description;
    if (exchange_.describe_pair) description.fields.push_back(exchange_.describe_pair(peer));
    return description;
  }

  void sendDescriptions() {
    descriptions_.resize(exchange_.describe_pair ? size_ - 1 : std::min(size_ - 1, 1));
    size_t bytes = 0;
    for (int d = 1; d < size_; ++d) {
      const bool first = static_cast<size_t>(d) <= descriptions_.size();
      Outgoing& frame = first ? descriptions_[d - 1] : descriptions_[0];
      if (first) bytes = sealText(memoryOf(frame).get(), op_.header(FrameKind::control), descriptionFor(to(d)).text());
      send(frame, to(d), bytes);
    }
  }

  void sendRound(size_t r) {
    const Round& round = rounds_[r];
    const bool same = phase(round).same_to_all;
    giveBack(r);
    std::vector<Outgoing>& slot = outgoing_[r % ahead_];
    slot.resize(std::max(slot.size(), same ? size_t{1} : static_cast<size_t>(size_ - 1)));
    // Every peer's frame is encoded before any is sent: a rank that finds a NaN tells all of them in the same round.
    if (!gaveUp()) encodeRound(r, slot);
    size_t bytes = 0;
    for (int d = 1; d < size_; ++d) {
      const MessagePlan* message = outgoing(to(d), round);
      if (!message) continue;
      Outgoing& frame = slot[same ? 0 : d - 1];
      if (!same || bytes == 0) {
        if (gaveUp()) {
          bytes = sealText(memoryOf(frame).get(), op_.header(FrameKind::error), reason_);
        } else {
          Stopwatch watch(op_, Doing::encode);
          bytes = seal(frame.buffer, dataHeader(*message, round));
        }
      }
      send(frame, to(d), bytes);
    }
  }

  // Before round r is sent: the rounds two windows before it are over, and their frames have left or are about to. Held
  // on to, their buffers would be those of the largest window there may be.
  void giveBack(size_t r) {
    const size_t behind = std::min(2 * window(), ahead_);
    for (; given_back_ + behind <= r; ++given_back_) {
      for (Outgoing& frame : outgoing_[given_back_ % ahead_]) {
        settle(frame);
        frame.buffer.reset();
      }
    }
  }

  FrameHeader dataHeader(const MessagePlan& message, const Round& round) const {
    FrameHeader header = message.header(message.frames[round.k]);
    header.sequence = op_.sequence;
    header.epoch = group_.epoch;
    return header;
  }

  // Round r, and the next one where what it is made of is there: a device makes that one's frames while the host waits
  // for these.
  void startRounds(size_t r) {
    for (; started_ < rounds_.size() && started_ <= r + 1 && rounds_[started_].needs <= finished_; ++started_) {
      const Round& round = rounds_[started_];
      if (phase(round).start) phase(round).start(round.k);
    }
  }

  void encodeRound(size_t r, std::vector<Outgoing>& slot) {
    Stopwatch watch(op_, Doing::encode);
    const Round& round = rounds_[r];
    const Phase& now = phase(round);
    const auto encode = [&](Outgoing& frame, int peer, const MessagePlan& message) {
      std::byte* payload = memoryOf(frame).get() + kFrameHeaderBytes;
      now.encode(round.k, peer, {payload, message.frames[round.k].payload_bytes});
    };
    try {
      startRounds(r);
      if (now.check) now.check(round.k);
      if (now.same_to_all) {
        if (const MessagePlan* message = sameToAll(round)) encode(slot[0], rank_, *message);
        return;
      }
      for (int d = 1; d < size_; ++d) {
        if (const MessagePlan* message = outgoing(to(d), round)) encode(slot[d - 1], to(d), *message);
      }
    } catch (const ValueError& error) {
      giveUp(error);
    }
  }

  // In a catch block: this rank's data cannot be sent.
  void giveUp(const ValueError& error) {
    own_error_ = std::current_exception();
    reason_ = op_.refusal(error);
  }

  // What a round carries to everybody and this rank keeps too; null where it carries nothing.
  const MessagePlan* sameToAll(const Round& round) const {
    return phase(round).same_to_all ? outgoing(rank_, round) : nullptr;
  }

  Buffer& memoryOf(Outgoing& frame) {
    if (!frame.buffer) frame.buffer = group_.frames.take();
    return frame.buffer;
  }

  void checkDescriptions() {
    std::string difference;
    int odd = -1;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      take(*peers_[peer].describing, peer, "waiting for its description of the op");
      KeyValues theirs;
      op_.attribute(peer, [&] {
        auto bytes = group_.frames.span(peers_[peer].description_in);
        FrameHeader got = openFrame(bytes);
        FrameHeader want = op_.header(FrameKind::control);
        want.payload_bytes = got.payload_bytes;
        expectFrame(got, want);
        auto text = framePayload(bytes, got);
        theirs = KeyValues::parse({reinterpret_cast<const char*>(text.data()), text.size()});
        op_.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
      });
      try {
        expectSameHello(descriptionFor(peer), rank_, theirs, peer);
      } catch (const WireError& error) {
        peers_[peer].differs = true;
        if (difference.empty()) std::tie(odd, difference) = std::pair(peer, error.what());
      }
    }
    if (odd >= 0) partWith(odd, difference);
  }

  // Ranks that describe another op have other frames for this one than it has posted receives for, and the other way
  // round. Both tell each other how many, the smaller number is filled up with error frames, and every receive is
  // waited for: nothing of this op is left on the lane, and the group goes on. A rank that agrees with this one gets
  // error frames, as when this rank cannot encode.
  void partWith(int odd, const std::string& difference) {
    own_error_ = op_.differs(odd, difference);
    reason_ = (group_.rankName(rank_) + ": " + difference).substr(0, kMaxErrorText);
    std::map<int, FrameCounts> mine;
    for (int peer = 0; peer < size_; ++peer) {
      if (peers_[peer].differs) mine[peer] = {peers_[peer].sent, peers_[peer].received};
    }
    const std::map<int, FrameCounts> theirs = exchangeFrameCounts(op_, mine);
    const size_t bytes = sealText(memoryOf(filler_).get(), op_.header(FrameKind::error), reason_);
    for (const auto& [peer, counts] : theirs) {
      while (peers_[peer].sent < counts.expected)
        send(filler_, peer, bytes);
    }
    for (const auto& [peer, counts] : theirs) {
      for (auto& receiving : peers_[peer].receiving) {
        if (receiving) op_.wait(*receiving, peer, "waiting for a frame that is not taken");
      }
      const Buffer ignored = group_.frames.take();
      while (peers_[peer].received < counts.sent)
        op_.wait(*receive(peer, ignored), peer, "waiting for a frame that is not taken");
    }
  }

  void finishRound(size_t r) {
    const Round& round = rounds_[r];
    const auto waited = op_.counters.wait;
    const uint64_t received = op_.counters.received_bytes;
    std::vector<std::span<const std::byte>> payloads(size_);
    for (int d = 1; d < size_; ++d) {
      const int peer = from(d);
      const MessagePlan* message = incoming(peer, round);
      if (!message) continue;
      take(*peers_[peer].receiving[r % ahead_], peer, "waiting for a frame");
      Stopwatch watch(op_, Doing::decode);
      op_.attribute(peer, [&] {
        auto bytes = group_.frames.span(peers_[peer].in[r % ahead_]);
        FrameHeader got = openFrame(bytes);
        op_.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
        payloads[peer] = framePayload(bytes, got);
        if (got.kind == FrameKind::error && got.sequence == op_.sequence && got.epoch == group_.epoch) {
          noteRefusal(peer, payloads[peer]);
        } else {
          expectFrame(got, dataHeader(*message, round));
        }
      });
    }
    if (const uint64_t came = op_.counters.received_bytes - received; r > 0 && came > 0 && !gaveUp()) {
      group_.window.waited(op_.counters.wait - waited, came);
    }
    if (!gaveUp()) {
      Stopwatch watch(op_, Doing::decode);
      if (const MessagePlan* message = sameToAll(round)) {
        const std::byte* payload = outgoing_[r % ahead_][0].buffer.get() + kFrameHeaderBytes;
        payloads[rank_] = {payload, message->frames[round.k].payload_bytes};
      }
      try {
        phase(round).absorb(round.k, payloads);
      } catch (const ValueError& error) {
        giveUp(error);
      }
    }
    if (r + ahead_ < rounds_.size()) {
      for (int d = 1; d < size_; ++d)
        post(from(d), r + ahead_);
    }
  }

  // A peer gave up: what this rank still has to send is of no use, so it gives up too, in small frames.
  void noteRefusal(int peer, std::span<const std::byte> text) {
    if (gaveUp()) return;
    refused_ = peer;
    reason_.assign(reinterpret_cast<const char*>(text.data()), std::min(text.size(), kMaxErrorText));
  }

  OpContext& op_;
  const Exchange& exchange_;
  GroupContext& group_;
  const int rank_, size_;
  std::vector<Peer> peers_;
  const std::vector<Round> rounds_;
  const size_t ahead_;                                  // rounds that receives are posted for
  size_t started_ = 0, finished_ = 0, given_back_ = 0;  // rounds
  std::array<std::vector<Outgoing>, SendWindow::kMost> outgoing_;
  std::vector<Outgoing> descriptions_;
  Outgoing filler_;  // to ranks that describe another op
  std::exception_ptr own_error_;
  std::optional<int> refused_;  // the peer whose error frame came first
  std::string reason_;          // text of this rank's error frames; a peer's may be empty
};

}  // namespace

void runExchange(OpContext& op, const Exchange& exchange) {
  Runner(op, exchange).run();
}

}  // namespace lowcomm

#include "collective/exchange.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using Buffer = BufferPool::Buffer;

constexpr size_t kMaxErrorText = 1024;

struct Round {
  size_t message;
  size_t chunk;
};

// One peer's side of the conversation: what was posted and what came.
struct Peer {
  std::array<Buffer, kWindow> in;
  std::array<std::unique_ptr<Transfer>, kWindow> receiving;
  Buffer description_in;
  std::unique_ptr<Transfer> describing;
};

// One frame under way to one or more peers.
struct Outgoing {
  Buffer buffer;
  std::vector<std::pair<int, std::unique_ptr<Transfer>>> sending;
};

class Runner {
 public:
  Runner(OpContext& op, const Exchange& exchange)
      : op_(op), exchange_(exchange), group_(op.group), rank_(group_.rank()), size_(group_.size()), peers_(size_) {
    for (size_t m = 0; m < exchange.messages.size(); ++m) {
      for (size_t c = 0; c < exchange.messages[m].chunks.size(); ++c)
        rounds_.push_back({m, c});
    }
  }

  void run() {
    op_.conversing = true;
    for (int d = 1; d < size_; ++d) {
      Peer& peer = peers_[from(d)];
      peer.description_in = group_.frames.take();
      peer.describing = receive(from(d), peer.description_in);
      for (size_t r = 0; r < std::min(kWindow, rounds_.size()); ++r)
        post(from(d), r);
    }
    sendDescription();
    const size_t lag = kWindow - 1;
    for (size_t step = 0; step < rounds_.size() + lag; ++step) {
      if (step < rounds_.size()) sendRound(step);
      if (step == std::min(lag, rounds_.size())) checkDescriptions();
      if (step >= lag) finishRound(step - lag);
    }
    for (auto& slot : outgoing_) {
      for (Outgoing& frame : slot)
        settle(frame);
    }
    settle(description_);
    op_.conversing = false;
    if (own_error_) std::rethrow_exception(own_error_);
    if (refused_) {
      throw PeerRefused("lowcomm: " + op_.op + " failed, a rank could not send its part: " +
                        (reason_.empty() ? "it gave no reason" : reason_) + " [op " + op_.op + ", sequence " +
                        std::to_string(op_.sequence) + ", group " + group_.name + ", told by " +
                        group_.rankName(*refused_) + " to " + group_.rankName(rank_) + "]");
    }
  }

 private:
  int from(int distance) const { return (rank_ - distance + size_) % size_; }
  int to(int distance) const { return (rank_ + distance) % size_; }
  const MessagePlan& plan(const Round& round) const { return exchange_.messages[round.message]; }
  const Chunk& chunk(const Round& round) const { return plan(round).chunks[round.chunk]; }

  // Whether the rest of this rank's frames are error frames, and what still comes is only received.
  bool gaveUp() const { return own_error_ || refused_; }

  std::unique_ptr<Transfer> receive(int peer, const Buffer& buffer) {
    return guarded(peer, [&] { return group_.transport.irecv(Lane::bulk, peer, 0, group_.frames.span(buffer)); });
  }

  void send(Outgoing& frame, int peer, size_t bytes) {
    auto data = std::span<const std::byte>(frame.buffer.get(), bytes);
    frame.sending.emplace_back(peer, guarded(peer, [&] { return group_.transport.isend(Lane::bulk, peer, 0, data); }));
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
    for (auto& [peer, transfer] : frame.sending)
      op_.wait(*transfer, peer, "sending a frame");
    frame.sending.clear();
  }

  // Posts the receive of round r from `peer`.
  void post(int peer, size_t r) {
    Peer& p = peers_[peer];
    Buffer& buffer = p.in[r % kWindow];
    if (!buffer) buffer = group_.frames.take();
    p.receiving[r % kWindow] = receive(peer, buffer);
  }

  size_t seal(Buffer& buffer, FrameHeader header) {
    const size_t bytes = kFrameHeaderBytes + header.payload_bytes;
    sealFrame({buffer.get(), bytes}, header);
    return bytes;
  }

  size_t sealText(Buffer& buffer, FrameKind kind, const std::string& text) {
    FrameHeader header = op_.header(kind);
    header.payload_bytes = static_cast<uint32_t>(text.size());
    std::memcpy(buffer.get() + kFrameHeaderBytes, text.data(), text.size());
    return seal(buffer, header);
  }

  void sendDescription() {
    if (size_ == 1) return;
    description_.buffer = group_.frames.take();
    const size_t bytes = sealText(description_.buffer, FrameKind::control, exchange_.description.text());
    for (int d = 1; d < size_; ++d)
      send(description_, to(d), bytes);
  }

  void sendRound(size_t r) {
    std::vector<Outgoing>& slot = outgoing_[r % kWindow];
    for (Outgoing& frame : slot)
      settle(frame);
    const size_t frames = exchange_.same_to_all ? 1 : static_cast<size_t>(size_ - 1);
    slot.resize(frames);
    for (Outgoing& frame : slot) {
      if (!frame.buffer) frame.buffer = group_.frames.take();
    }
    // Every peer's frame is encoded before any is sent: a rank that finds a NaN tells all of them in the same round.
    if (!gaveUp()) encodeRound(r, slot);
    size_t bytes = 0;
    for (Outgoing& frame : slot) {
      if (gaveUp()) {
        bytes = sealText(frame.buffer, FrameKind::error, reason_);
      } else {
        Stopwatch watch(op_.counters.encode);
        bytes = seal(frame.buffer, dataHeader(rounds_[r]));
      }
    }
    for (int d = 1; d < size_; ++d)
      send(slot[exchange_.same_to_all ? 0 : d - 1], to(d), bytes);
  }

  FrameHeader dataHeader(const Round& round) const {
    FrameHeader header = plan(round).header(chunk(round));
    header.sequence = op_.sequence;
    header.epoch = group_.epoch;
    return header;
  }

  void encodeRound(size_t r, std::vector<Outgoing>& slot) {
    Stopwatch watch(op_.counters.encode);
    const Chunk& what = chunk(rounds_[r]);
    try {
      if (exchange_.check) exchange_.check(rounds_[r].message, what);
      for (size_t i = 0; i < slot.size(); ++i) {
        std::span<std::byte> payload(slot[i].buffer.get() + kFrameHeaderBytes, what.payload_bytes);
        exchange_.encode(rounds_[r].message, what, to(static_cast<int>(i) + 1), payload);
      }
    } catch (const ValueError& error) {
      own_error_ = std::current_exception();
      reason_ = (group_.rankName(rank_) + ": " + error.what()).substr(0, kMaxErrorText);
    }
  }

  void checkDescriptions() {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      op_.wait(*peers_[peer].describing, peer, "waiting for its description of the op");
      op_.blame(peer, [&] {
        auto bytes = group_.frames.span(peers_[peer].description_in);
        FrameHeader got = openFrame(bytes);
        FrameHeader want = op_.header(FrameKind::control);
        want.payload_bytes = got.payload_bytes;
        expectFrame(got, want);
        auto text = framePayload(bytes, got);
        Hello theirs = Hello::parse({reinterpret_cast<const char*>(text.data()), text.size()});
        expectSameHello(exchange_.description, rank_, theirs, peer);
        op_.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
      });
    }
  }

  void finishRound(size_t r) {
    const Round& round = rounds_[r];
    std::vector<std::span<const std::byte>> payloads(size_);
    for (int d = 1; d < size_; ++d) {
      const int peer = from(d);
      op_.wait(*peers_[peer].receiving[r % kWindow], peer, "waiting for a frame");
      Stopwatch watch(op_.counters.decode);
      op_.blame(peer, [&] {
        auto bytes = group_.frames.span(peers_[peer].in[r % kWindow]);
        FrameHeader got = openFrame(bytes);
        op_.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
        payloads[peer] = framePayload(bytes, got);
        if (got.kind == FrameKind::error && got.sequence == op_.sequence && got.epoch == group_.epoch) {
          noteRefusal(peer, payloads[peer]);
        } else {
          expectFrame(got, dataHeader(round));
        }
      });
    }
    if (!gaveUp()) {
      Stopwatch watch(op_.counters.decode);
      if (exchange_.same_to_all) {
        payloads[rank_] = {outgoing_[r % kWindow][0].buffer.get() + kFrameHeaderBytes, chunk(round).payload_bytes};
      }
      exchange_.absorb(round.message, chunk(round), payloads);
    }
    if (r + kWindow < rounds_.size()) {
      for (int d = 1; d < size_; ++d)
        post(from(d), r + kWindow);
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
  std::vector<Round> rounds_;
  std::array<std::vector<Outgoing>, kWindow> outgoing_;
  Outgoing description_;
  std::exception_ptr own_error_;
  std::optional<int> refused_;  // the peer whose error frame came first
  std::string reason_;          // text of this rank's error frames; a peer's may be empty
};

}  // namespace

void runExchange(OpContext& op, const Exchange& exchange) {
  Runner(op, exchange).run();
}

}  // namespace lowcomm

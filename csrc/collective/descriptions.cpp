#include "collective/descriptions.h"

#include <algorithm>
#include <charconv>
#include <cstddef>

#include "base/error.h"
#include "collective/context.h"
#include "collective/exchange.h"
#include "collective/plan.h"
#include "collective/text_exchange.h"

namespace lowcomm {
namespace {

constexpr const char* kRates = "rates";  // the last field, which ranks do not compare

uint32_t numberOf(const KeyValues& counts, const std::string& name) {
  for (const auto& [key, value] : counts.fields) {
    uint32_t number = 0;
    const char* end = value.data() + value.size();
    if (key == name && std::from_chars(value.data(), end, number).ptr == end && !value.empty()) return number;
  }
  throw WireError("frame counts: expected a number of '" + name + "', got none");
}

}  // namespace

Descriptions::Descriptions(OpContext& op, const Exchange& exchange, Conversation& conversation)
    : op_(op), exchange_(exchange), conversation_(conversation), differs_(op.size()) {}

// The text that this rank sends `peer` about the op, and expects from it.
KeyValues Descriptions::forPeer(int peer) const {
  KeyValues description = exchange_.description;
  if (!exchange_.pair_fields.empty()) description.fields.push_back(exchange_.pair_fields[peer]);
  return description;
}

// The field with which this rank tells its links' rates; empty where it tells none.
std::string Descriptions::rates() const {
  return exchange_.cut_by_links ? op_.group.links.text() : "";
}

void Descriptions::record() const {
  op_.note([&](OpProgress::State& state) {
    state.description = exchange_.description.fields;
    state.frames.resize(op_.size());
    for (int peer = 0; peer < op_.size(); ++peer) {
      if (peer == op_.rank()) continue;
      state.frames[peer].expected = 1;  // the description
      for (const Phase* phase : exchange_.phases)
        state.frames[peer].expected += phase->in[peer] ? static_cast<uint32_t>(phase->in[peer]->frames.size()) : 0;
    }
  });
}

void Descriptions::send() {
  const int peers = op_.size() - 1;
  frames_.resize(exchange_.pair_fields.empty() ? std::min(peers, 1) : peers);
  size_t bytes = 0;
  for (int d = 1; d <= peers; ++d) {
    const int peer = conversation_.to(d);
    const bool first = static_cast<size_t>(d) <= frames_.size();
    OutgoingFrame& frame = first ? frames_[d - 1] : frames_[0];
    if (first) {
      KeyValues description = forPeer(peer);
      if (const std::string mine = rates(); !mine.empty()) description.fields.emplace_back(kRates, mine);
      const std::string text = description.text();
      std::byte* const memory = conversation_.memoryOf(frame, kFrameHeaderBytes + text.size());
      bytes = sealText(memory, op_.header(FrameKind::control), text);
    }
    conversation_.send(frame, peer, bytes);
  }
}

std::optional<Descriptions::Difference> Descriptions::compare() {
  std::optional<Difference> first;
  std::vector<std::vector<uint64_t>> told;  // of all ranks up to the peer
  const auto tell = [&](const std::string& text) {
    if (!text.empty()) told.push_back(LinkShares::parse(text, op_.size()));
  };
  for (int peer = 0; peer < op_.size(); ++peer) {
    if (peer == op_.rank()) {
      tell(rates());
      continue;
    }
    const auto bytes = conversation_.takeDescription(peer);
    KeyValues theirs;
    op_.attribute(peer, [&] {
      theirs = fieldsIn(op_, FrameKind::control, bytes);
      if (theirs.fields.empty() || theirs.fields.back().first != kRates) return;
      tell(theirs.fields.back().second);
      theirs.fields.pop_back();
    });
    try {
      expectSameFields(forPeer(peer), op_.rank(), theirs, peer);
    } catch (const WireError& error) {
      differs_[peer] = true;
      if (!first) first = {peer, error.what()};
    }
  }
  if (told.size() == differs_.size()) op_.group.links.agree(told);
  return first;
}

void Descriptions::part(const std::string& reason) {
  const std::map<int, FrameCounts> partings = exchangeCounts();
  std::byte* const memory = conversation_.memoryOf(filler_, kFrameHeaderBytes + reason.size());
  const size_t bytes = sealText(memory, op_.header(FrameKind::error), reason);
  for (const auto& [peer, theirs] : partings) {
    while (conversation_.sent(peer) < theirs.expected)
      conversation_.send(filler_, peer, bytes);
  }
  for (const auto& [peer, theirs] : partings)
    conversation_.ignore(peer, theirs.sent);
}

// With every peer that differs, each of which does so with this rank among its own.
std::map<int, Descriptions::FrameCounts> Descriptions::exchangeCounts() const {
  op_.group.leaving.settle(op_);  // control messages must not overtake them (OpContext::receive)
  std::vector<TextExchange> peers;
  for (int peer = 0; peer < op_.size(); ++peer) {
    if (!differs_[peer]) continue;
    peers.emplace_back(op_, peer, FrameKind::control, Lane::control, op_.first_tag + kCountsTag).post();
  }
  for (TextExchange& peer : peers) {
    KeyValues mine{{{"frames sent", std::to_string(conversation_.sent(peer.peer()))},
                    {"frames expected", std::to_string(conversation_.posted(peer.peer()))}}};
    peer.send(mine.text());
  }
  std::map<int, FrameCounts> theirs;
  for (TextExchange& peer : peers) {
    const KeyValues counts = peer.receive("waiting for its frame counts");
    peer.settle("sending frame counts");
    op_.attribute(peer.peer(), [&] {
      theirs[peer.peer()] = {numberOf(counts, "frames sent"), numberOf(counts, "frames expected")};
    });
  }
  return theirs;
}

std::vector<OutgoingFrame> Descriptions::release() {
  frames_.push_back(std::move(filler_));
  return std::move(frames_);
}

}  // namespace lowcomm

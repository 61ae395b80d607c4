#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collective/context.h"
#include "collective/plan.h"
#include "wire/key_values.h"

namespace lowcomm {

// Some rounds of an exchange in which every rank has one role: a message from or to each peer. Round k carries frame k
// of every message that has as many.
struct Phase {
  // What this rank sends to and gets from each rank; null is nothing. Its own entries are what it keeps: nothing of
  // them travels, but their frames are rounds too. The plans must live until the end. What one rank sends another
  // expects, cut alike.
  std::vector<const MessagePlan*> out, in;

  // Whether all of `out` is one message of the same bytes: encoded once.
  bool same_to_all = false;

  // The phase before this one that frames are made from, if any: frame k is made once round ready(k) of that phase is
  // absorbed.
  std::optional<size_t> after;
  std::function<size_t(size_t k)> ready;

  // Looks at what this rank keeps of round k, before any of it is encoded; may be empty. Called in a group of one rank
  // too, where nothing is encoded for anybody. ValueError as in `encode`.
  std::function<void(size_t k)> check;

  // Begins what `check` and `encode` of round k end with, for elements that a device encodes
  // (collective/device_codec.h): called once what the round is made of is there, in order, up to a round ahead of them.
  // May be empty. ValueError as in `encode`.
  std::function<void(size_t k)> start;

  // Writes the payload of frame k of out[peer] (any peer when same_to_all). ValueError: this rank's data cannot be
  // sent.
  std::function<void(size_t k, int peer, std::span<std::byte> payload)> encode;

  // Takes round k's payloads by rank, empty where there is none; this rank's own is what it sent when same_to_all.
  // Bytes that do not decode are to be attributed to their sender (OpContext::attribute).
  std::function<void(size_t k, const std::vector<std::span<const std::byte>>& payloads)> absorb;

  // Rounds it takes: the frames of the longest message.
  size_t rounds() const;
};

// What is under every collective: each rank sends the frames of its messages to its peers and receives theirs, a round
// being at most one frame to and from each peer. Receives are posted before sends, several rounds are under way at a
// time (send_window.h), and a round is encoded while the ones before it travel.
//
// The conversation with a peer is: one control frame that describes the op, then the frames. Ranks that disagree find
// out by the descriptions: each throws PeerRefused with both values, nothing is taken, and the group goes on. A rank
// that cannot encode (a NaN) sends error frames in place of what is left, so
// every posted receive still completes, every rank it still talks to gets the error, and the group goes on.
struct Exchange {
  // What ranks must agree on: op, dtype, sizes, codec, reduce op.
  KeyValues description;

  // One more field for each peer, which the two of them say alike; may be empty.
  std::function<std::pair<std::string, std::string>(int peer)> describe_pair;

  std::vector<Phase> phases;  // in order
};

// Runs it to the end. Throws ValueError when this rank's own data could not be encoded, PeerRefused when a peer's could
// not or ranks describe different ops: the group goes on after each. Any other PeerError means that a peer or the
// network failed and the lane is lost.
void runExchange(OpContext& op, const Exchange& exchange);

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "codec/error.h"
#include "collective/context.h"
#include "collective/plan.h"
#include "wire/hello.h"

namespace lowcomm {

// The direct exchange under every collective: each rank sends the frames of its messages to every peer and receives
// theirs, a round being one frame to and from each peer. Receives are posted before sends, kWindow rounds are under way
// at a time, and a round is encoded while the ones before it travel.
//
// The conversation with a peer is: one control frame that describes the op (ranks that disagree find out here, with
// both values), then one frame a round. A rank that cannot encode (a NaN) sends error frames in place of what is left,
// so every posted receive still completes, every rank gets the error, and the group goes on.
struct Exchange {
  // What ranks must agree on: op, dtype, sizes, codec, reduce op.
  Hello description;

  // One message a tensor; its chunks are the rounds, in order.
  std::vector<MessagePlan> messages;

  // Whether every peer gets the same bytes (all_gather): encoded once, sent size−1 times.
  bool same_to_all = false;

  // Looks at what this rank keeps of a chunk, before any of it is encoded; may be empty. Called in a group of one rank
  // too, where nothing is encoded for anybody. ValueError as in `encode`.
  std::function<void(size_t message, const Chunk& chunk)> check;

  // Writes the payload of a chunk for `peer` (any value when same_to_all). ValueError: this rank's data cannot be sent.
  std::function<void(size_t message, const Chunk& chunk, int peer, std::span<std::byte> payload)> encode;

  // Takes a round's payloads by rank; this rank's own is what it sent when same_to_all, else empty. Bytes that do not
  // decode are to be blamed on their sender (OpContext::blame).
  std::function<void(size_t message, const Chunk& chunk, const std::vector<std::span<const std::byte>>& payloads)>
      absorb;
};

inline constexpr size_t kWindow = 4;

// A peer could not send its data (its caller's mistake). The conversation stayed whole: the op failed, the group did
// not.
struct PeerRefused : PeerError {
  using PeerError::PeerError;
};

// Runs it to the end. Throws ValueError when this rank's own data could not be encoded and PeerRefused when a peer's
// could not: the group goes on after both. Any other PeerError means that a peer or the network failed and the lane is
// lost.
void runExchange(OpContext& op, const Exchange& exchange);

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <span>
#include <vector>

#include "collective/plan.h"

namespace lowcomm {

// Payloads that travel in several frames because their codec cannot be cut: encoded as a whole with the first part, and
// decoded as a whole with the last. A payload in one frame is never copied.

// The sender's side: for every peer the payload under way.
class OutgoingParts {
 public:
  // Writes the run's part of its payload for `peer` to `to`. `encode(span)` makes the whole payload.
  template <class F>
  void write(std::span<std::byte> to, const Run& run, int peer, F&& encode) {
    if (run.bytes == run.whole) return encode(to);
    std::vector<std::byte>& payload = payloads_[peer];
    if (run.part == 0) {
      payload.resize(run.whole);
      encode(std::span(payload));
    }
    std::memcpy(to.data(), payload.data() + run.part, run.bytes);
    if (run.last()) payloads_.erase(peer);
  }

 private:
  std::map<int, std::vector<std::byte>> payloads_;
};

// The receiver's side: for every rank what has come.
class IncomingParts {
 public:
  // Takes the run's part from `rank`; with the last one the whole payload, which stays until that rank's next part,
  // else nothing.
  std::span<const std::byte> take(const Run& run, int rank, std::span<const std::byte> part) {
    if (run.bytes == run.whole) return part;
    std::vector<std::byte>& payload = payloads_[rank];
    payload.resize(run.whole);
    std::memcpy(payload.data() + run.part, part.data(), run.bytes);
    return run.last() ? payload : std::span<const std::byte>();
  }

 private:
  std::map<int, std::vector<std::byte>> payloads_;
};

}  // namespace lowcomm

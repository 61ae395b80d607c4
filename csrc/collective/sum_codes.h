#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/plan.h"

namespace lowcomm {

// The codes of a slice's sums, frame after frame.
class SumCodes {
 public:
  // `slice` outlives this.
  explicit SumCodes(const MessagePlan& slice);

  // Of a whole run, given the number of the frame that its last part is in.
  std::span<std::byte> of(size_t k, const Run& run) { return std::span(bytes_).subspan(at(k, run), run.whole); }
  std::span<const std::byte> of(size_t k, const Run& run) const {
    return std::span(bytes_).subspan(at(k, run), run.whole);
  }

  // The payload of frame k: written there, and taken from there.
  void copy(size_t k, std::span<std::byte> payload) const;
  void take(size_t k, std::span<const std::byte> payload);

  size_t bytes() const { return bytes_.size(); }

 private:
  size_t at(size_t k, const Run& run) const;

  const MessagePlan& slice_;
  std::vector<size_t> starts_;  // by frame: where its payload is in bytes_
  std::vector<std::byte> bytes_;
};

}  // namespace lowcomm

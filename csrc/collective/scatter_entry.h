#pragma once

#include <cstdint>
#include <vector>

namespace lowcomm {

// A segment of a message whose elements are not in one piece: part of one of several tensors.
struct ScatterEntry {
  uint64_t count = 0;  // elements, 1 or more
  void* data = nullptr;
  float* residual = nullptr;  // error feedback's of these elements; null: none
  uint64_t slot = 0;          // of the message's draws, so that a tensor's do not depend on what travels with it
};

// By rank, whose slice they make up, in order.
using SegmentPlaces = std::vector<std::vector<ScatterEntry>>;

}  // namespace lowcomm

#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace lowcomm {

// The loss of encoding, in squares: of ||decoded - x|| and ||x||.
struct Loss {
  double lost = 0, whole = 0;

  bool taken() const { return whole > 0; }
};

// The samples of a message whose two sides remember them (pipeline/delta_source.h): how many travelled as changes and
// how many for the first time, and sums over some of the former's elements a and what was remembered of them, m.
struct SampleCounters {
  uint64_t seen = 0, first = 0;
  uint64_t measured = 0;           // elements in the sums
  double values = 0, changes = 0;  // of |a| and of |a - m|

  SampleCounters& operator+=(const SampleCounters& more) {
    seen += more.seen;
    first += more.first;
    measured += more.measured;
    values += more.values;
    changes += more.changes;
    return *this;
  }
};

// The bytes that one op moved, and where its time went.
struct OpCounters {
  uint64_t raw_bytes = 0;   // what this rank would send without a codec, headers aside
  uint64_t wire_bytes = 0;  // sent by this rank, frame headers included
  uint64_t received_bytes = 0;
  // Of tensors on a device: what was copied between it and the host, codes or values.
  uint64_t device_to_host_bytes = 0, host_to_device_bytes = 0;
  std::chrono::nanoseconds encode{0}, wait{0}, decode{0};
  std::vector<std::chrono::nanoseconds> wait_by_peer;  // `wait` by rank; empty where nothing was waited for
  Loss loss;                                           // of a sample of what this rank encoded
  SampleCounters samples;                              // that this rank sent
  bool exact = false;                                  // of an optimizer's op: none of it was coded
};

// An op's ways to spend its time.
enum class Doing : uint8_t { encode, wait, decode };

// A stretch of an op's time, for a profiler.
struct Stretch {
  Doing doing;
  std::chrono::steady_clock::time_point start, end;
};
using Timeline = std::vector<Stretch>;

}  // namespace lowcomm

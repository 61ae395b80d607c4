#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lowcomm {

struct ConnectionReport;

// The lengths of the slices that a group's ranks sum in an all_reduce, where the ranks' links are of unequal speed. A
// rank that owns a slice of s of n bytes sends, and receives, n + (W - 2)·s bytes (all_reduce.h), so that with equal
// slices a slow rank holds up all others. With rates r all ranks take T = max(1 / min r, (2W - 2) / Σ r) times n at
// most, if s is in proportion to T·r - 1, and both phases of the op are under way at once, for a slow rank sends in one
// and receives in the other. No slices take less: each rank sends n, and all of them (2W - 2)·n.
//
// Each rank measures what its connections carry to every other one, and sends these rates in the description of its
// all_reduces. Ranks cut by what the last op told all of them. The worker's thread alone.
class LinkShares {
 public:
  // With `equal` it knows nothing and tells nothing, so that no rank of the group cuts by rates.
  explicit LinkShares(int ranks, bool equal = false);

  // Whether it is worth asking for the reports of the connections: a tenth of a second after it has had some.
  bool isDue();
  // Takes them, after an op in which this rank has sent its peers much.
  void measure(const std::vector<ConnectionReport>& connections);

  // KiB/s to each rank, in decimal with spaces between them, 0 for what is not known; empty where nothing is.
  std::string text() const;

  // The numbers of a peer's text. WireError for another number of them, or for no numbers.
  static std::vector<uint64_t> parse(std::string_view text, size_t ranks);

  // Takes the rates that ranks have sent in one op, by sender and receiver. A rank's rate is the lower one of what it
  // sends and what it receives in all. Nothing changes while a rate is not known, or while each is within a quarter of
  // what it was when the shares were made.
  void agree(const std::vector<std::vector<uint64_t>>& rates);

  // Numbers by rank, to which the lengths of slices are in proportion. They are empty where slices are equal, as they
  // are while the ranks' rates are within a quarter of each other. All ranks have the same.
  const std::vector<uint64_t>& weights() const { return weights_; }

 private:
  struct Carried {
    uint64_t bytes = 0;  // that a peer has acknowledged
    double busy_s = 0;   // while there were some to send, or to be acknowledged
  };

  const bool equal_;
  std::chrono::steady_clock::time_point asked_;
  std::vector<Carried> before_;   // by peer, when they were last measured
  std::vector<uint64_t> rates_;   // by peer
  std::vector<uint64_t> agreed_;  // by rank
  std::vector<uint64_t> weights_;
};

}  // namespace lowcomm

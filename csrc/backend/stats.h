#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collective/context.h"

namespace lowcomm {

// Counters of one op of one group, since the group was made or reset() was called.
struct OpStats {
  uint64_t calls = 0;
  uint64_t exact_calls = 0;                          // of these, sent without a codec
  std::map<std::string, uint64_t> exact_because;     // tensors that went exact though somebody named the op, by reason
  uint64_t staged_calls = 0;                         // encoded and decoded on a device
  std::map<std::string, uint64_t> unstaged_because;  // coded calls of CUDA tensors that copied values, by reason
  uint64_t raw_bytes = 0;                            // what this rank would have sent without a codec
  uint64_t inner_bytes = 0;                          // of these, handed to the inner backend, which does not count
  uint64_t wire_bytes = 0;  // what it sent, headers included; 0 for ops the inner backend serves
  uint64_t device_to_host_bytes = 0, host_to_device_bytes = 0;  // of tensors on a device: codes, or values
  double encode_s = 0, wait_s = 0, decode_s = 0;

  // The peer that was waited for most; nothing where none was.
  std::optional<int> straggler() const;
  // ||decoded - x|| / ||x||; nothing where nothing was sampled.
  std::optional<double> relativeError() const;
  std::vector<double> wait_by_peer_s;  // of wait_s, by group rank; empty where nothing was waited for
  double loss = 0, encoded = 0;        // squares over what was sampled of what this rank encoded: of the error, of x
  SampleCounters samples;              // of a pipeline's sends: what they said of samples
  uint64_t forgotten = 0;              // samples that the two sides of a pipeline's boundary did not remember alike
  bool counted = false;                // whether wire_bytes is counted: lowcomm's own ops
};

// Thread-safe: callers count calls, the worker counts what moved.
class Stats {
 public:
  void call(const std::string& op, bool exact);
  // Whether it is the first for this reason.
  bool because(const std::string& op, const std::string& reason);
  void staged(const std::string& op);
  // Whether it is the first for this reason.
  bool unstaged(const std::string& op, const std::string& reason);
  void inner(const std::string& op, uint64_t raw_bytes);
  void moved(const std::string& op, const OpCounters& counters);
  void forgot(const std::string& op, uint64_t samples);
  std::map<std::string, OpStats> snapshot() const;
  void reset();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, OpStats> ops_;
};

}  // namespace lowcomm

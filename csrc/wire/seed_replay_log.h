#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lowcomm {

// The bytes that seed replay sends and keeps (FORMAT.md, "Seed replay"; Zelikman et al.: Just One Byte (per Gradient),
// 2023, section 2): messages with a machine's projected gradients of one iteration, and records, which all machines
// apply.

// A message: {machine u64, iteration u64, count u16, payload, CRC-32C u32}, little-endian.
struct ReplayMessage {
  uint64_t machine = 0;
  uint64_t iteration = 0;
  uint16_t count = 0;                  // of estimates
  std::span<const std::byte> payload;  // their codes; into the bytes that were read
};

inline constexpr size_t kReplayMessageBytes = 22;  // around the payload

std::vector<std::byte> writeReplayMessage(const ReplayMessage& message);

// Throws WireError: bytes that are too few, or a checksum that does not fit. The payload's length is the caller's to
// check: it is the codec's.
ReplayMessage readReplayMessage(std::span<const std::byte> bytes);

// A record: {its length u32, iteration u64, learning rate f32, weight decay f32, messages u32,
// messages' {machine u64, count u16, payload bytes u32, payload}, CRC-32C u32 of all before}. Records of following
// iterations, one behind another, are a log.
struct ReplayRecord {
  struct Entry {
    uint64_t machine = 0;
    uint16_t count = 0;
    std::span<const std::byte> payload;
  };
  uint64_t iteration = 0;
  float lr = 0;
  float weight_decay = 0;
  std::vector<Entry> entries;  // machines ascending
};

std::vector<std::byte> writeReplayRecord(const ReplayRecord& record);

// A log, read record by record; it does not own the bytes. Only read() and wholePrefix() look further into a record
// than its header, so that a walk over a long log is cheap.
class ReplayRecords {
 public:
  explicit ReplayRecords(std::span<const std::byte> log) : log_(log) {}

  // The iteration of the first record. Throws WireError: the log has no whole record.
  uint64_t firstIteration() const;

  // The log without its first `count` records. Throws WireError: it has fewer.
  std::span<const std::byte> skip(uint64_t count) const;

  // The records of iterations from `first` on. Throws WireError as read() does for a record that ends early.
  std::span<const std::byte> from(uint64_t first) const;

  // The whole records with which the log begins: bytes that a process left which was killed while it appended a record.
  std::span<const std::byte> wholePrefix() const;

  // All records. Throws WireError: a record ends early, a checksum is wrong, machines do not ascend, or an iteration
  // does not follow the one before.
  std::vector<ReplayRecord> read() const;

 private:
  struct Header {
    uint32_t length;  // of the record, in bytes
    uint64_t iteration;
  };
  Header headerAt(size_t at) const;

  std::span<const std::byte> log_;
};

}  // namespace lowcomm

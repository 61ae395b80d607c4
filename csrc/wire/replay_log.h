#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lowcomm {

// What seed replay sends and keeps (FORMAT.md, "Seed replay"; Zelikman et al.: Just One Byte (per Gradient), 2023,
// section 2): a machine's projected gradients of one iteration, and records of what all machines applied.

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

// All records of a log. Throws WireError: a record that ends early, a checksum that does not fit, machines that do not
// ascend, an iteration that does not follow the one before.
std::vector<ReplayRecord> readReplayRecords(std::span<const std::byte> log);

}  // namespace lowcomm

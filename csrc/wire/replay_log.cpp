#include "wire/replay_log.h"

#include <cstring>
#include <string>

#include "base/crc32c.h"
#include "base/cursor.h"
#include "base/error.h"

namespace lowcomm {
namespace {

constexpr size_t kLeastRecord = 4 + 8 + 4 + 4 + 4 + 4;
constexpr size_t kEntryBytes = 8 + 2 + 4;

template <typename T>
void put(std::vector<std::byte>& out, T value) {
  const size_t at = out.size();
  out.resize(at + sizeof(T));
  std::memcpy(out.data() + at, &value, sizeof(T));
}

void putBytes(std::vector<std::byte>& out, std::span<const std::byte> bytes) {
  out.insert(out.end(), bytes.begin(), bytes.end());
}

void putChecksum(std::vector<std::byte>& out) {
  put(out, crc32c(out.data(), out.size()));
}

void expectChecksum(std::span<const std::byte> whole, const std::string& what) {
  uint32_t stored;
  std::memcpy(&stored, whole.data() + whole.size() - sizeof stored, sizeof stored);
  const uint32_t found = crc32c(whole.data(), whole.size() - sizeof stored);
  if (found != stored) {
    throw WireError(what + ": expected the CRC-32C " + std::to_string(stored) + " that it ends with, got " +
                    std::to_string(found));
  }
}

ReplayRecord readRecord(std::span<const std::byte> bytes, const std::string& what) {
  expectChecksum(bytes, what);
  Cursor cursor(bytes.first(bytes.size() - 4), "seed replay record");
  cursor.read<uint32_t>("length");
  ReplayRecord record;
  record.iteration = cursor.read<uint64_t>("iteration");
  record.lr = cursor.read<float>("learning rate");
  record.weight_decay = cursor.read<float>("weight decay");
  const auto entries = cursor.read<uint32_t>("messages");
  size_t at = kLeastRecord - 4;
  for (uint32_t e = 0; e < entries; ++e) {
    Cursor head(bytes.subspan(at, bytes.size() - 4 - at), "seed replay record");
    ReplayRecord::Entry entry;
    entry.machine = head.read<uint64_t>("machine");
    entry.count = head.read<uint16_t>("count");
    const auto length = head.read<uint32_t>("payload bytes");
    at += kEntryBytes;
    if (length > bytes.size() - 4 - at) {
      throw WireError(what + ": payload of machine " + std::to_string(entry.machine) + ": expected " +
                      std::to_string(length) + " bytes, got " + std::to_string(bytes.size() - 4 - at));
    }
    entry.payload = bytes.subspan(at, length);
    at += length;
    if (!record.entries.empty() && record.entries.back().machine >= entry.machine) {
      throw WireError(what + ": expected machines in ascending order, got " + std::to_string(entry.machine) +
                      " after " + std::to_string(record.entries.back().machine));
    }
    record.entries.push_back(entry);
  }
  if (at != bytes.size() - 4) {
    throw WireError(what + ": expected " + std::to_string(at + 4) + " bytes, got " + std::to_string(bytes.size()));
  }
  return record;
}

}  // namespace

std::vector<std::byte> writeReplayMessage(const ReplayMessage& message) {
  std::vector<std::byte> out;
  put(out, message.machine);
  put(out, message.iteration);
  put(out, message.count);
  putBytes(out, message.payload);
  putChecksum(out);
  return out;
}

ReplayMessage readReplayMessage(std::span<const std::byte> bytes) {
  if (bytes.size() < kReplayMessageBytes) {
    throw WireError("seed replay message: expected " + std::to_string(kReplayMessageBytes) + " bytes or more, got " +
                    std::to_string(bytes.size()));
  }
  expectChecksum(bytes, "seed replay message");
  Cursor cursor(bytes, "seed replay message");
  ReplayMessage message;
  message.machine = cursor.read<uint64_t>("machine");
  message.iteration = cursor.read<uint64_t>("iteration");
  message.count = cursor.read<uint16_t>("count");
  message.payload = bytes.subspan(kReplayMessageBytes - 4, bytes.size() - kReplayMessageBytes);
  return message;
}

std::vector<std::byte> writeReplayRecord(const ReplayRecord& record) {
  size_t length = kLeastRecord;
  for (const auto& entry : record.entries)
    length += kEntryBytes + entry.payload.size();
  std::vector<std::byte> out;
  put(out, static_cast<uint32_t>(length));
  put(out, record.iteration);
  put(out, record.lr);
  put(out, record.weight_decay);
  put(out, static_cast<uint32_t>(record.entries.size()));
  for (const auto& entry : record.entries) {
    put(out, entry.machine);
    put(out, entry.count);
    put(out, static_cast<uint32_t>(entry.payload.size()));
    putBytes(out, entry.payload);
  }
  putChecksum(out);
  return out;
}

std::vector<ReplayRecord> readReplayRecords(std::span<const std::byte> log) {
  std::vector<ReplayRecord> records;
  for (size_t at = 0; at < log.size();) {
    const std::string what = "seed replay record at byte " + std::to_string(at);
    uint32_t length = 0;
    if (log.size() - at >= sizeof length) std::memcpy(&length, log.data() + at, sizeof length);
    if (length < kLeastRecord || length > log.size() - at) {
      throw WireError(what + ": expected a length of " + std::to_string(kLeastRecord) + " to " +
                      std::to_string(log.size() - at) + " bytes, got " + std::to_string(length));
    }
    records.push_back(readRecord(log.subspan(at, length), what));
    if (records.size() > 1 && records.back().iteration != records[records.size() - 2].iteration + 1) {
      throw WireError(what + ": expected iteration " + std::to_string(records[records.size() - 2].iteration + 1) +
                      ", got " + std::to_string(records.back().iteration));
    }
    at += length;
  }
  return records;
}

}  // namespace lowcomm

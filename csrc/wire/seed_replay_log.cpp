#include "wire/seed_replay_log.h"

#include <cstring>
#include <string>

#include "base/cursor.h"
#include "base/error.h"
#include "base/hashes.h"

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

std::string nameAt(size_t at) {
  return "seed replay record at byte " + std::to_string(at);
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

ReplayRecords::Header ReplayRecords::headerAt(size_t at) const {
  Header header{};
  const size_t left = log_.size() - at;
  if (left >= sizeof header.length) std::memcpy(&header.length, log_.data() + at, sizeof header.length);
  if (header.length < kLeastRecord || header.length > left) {
    throw WireError(nameAt(at) + ": expected a length of " + std::to_string(kLeastRecord) + " to " +
                    std::to_string(left) + " bytes, got " + std::to_string(header.length));
  }
  std::memcpy(&header.iteration, log_.data() + at + sizeof header.length, sizeof header.iteration);
  return header;
}

uint64_t ReplayRecords::firstIteration() const {
  return headerAt(0).iteration;
}

std::span<const std::byte> ReplayRecords::skip(uint64_t count) const {
  size_t at = 0;
  for (uint64_t skipped = 0; skipped < count; ++skipped)
    at += headerAt(at).length;
  return log_.subspan(at);
}

std::span<const std::byte> ReplayRecords::from(uint64_t first) const {
  size_t at = 0;
  while (at < log_.size()) {
    const Header header = headerAt(at);
    if (header.iteration >= first) break;
    at += header.length;
  }
  return log_.subspan(at);
}

std::span<const std::byte> ReplayRecords::wholePrefix() const {
  size_t at = 0;
  try {
    while (at < log_.size()) {
      const Header header = headerAt(at);
      readRecord(log_.subspan(at, header.length), nameAt(at));
      at += header.length;
    }
  } catch (const WireError&) {  // the record at `at` is not whole
  }
  return log_.first(at);
}

std::vector<ReplayRecord> ReplayRecords::read() const {
  std::vector<ReplayRecord> records;
  for (size_t at = 0; at < log_.size();) {
    const Header header = headerAt(at);
    records.push_back(readRecord(log_.subspan(at, header.length), nameAt(at)));
    if (records.size() > 1 && header.iteration != records[records.size() - 2].iteration + 1) {
      throw WireError(nameAt(at) + ": expected iteration " + std::to_string(records[records.size() - 2].iteration + 1) +
                      ", got " + std::to_string(header.iteration));
    }
    at += header.length;
  }
  return records;
}

}  // namespace lowcomm

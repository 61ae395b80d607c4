#include "pipeline/file_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/hashes.h"

namespace lowcomm {
namespace {

constexpr uint64_t kGroup = 128;
constexpr size_t kIndexBytes = 4096, kEntryBytes = 32;
enum State : uint32_t { kFree = 0, kWritten = 1, kBeingWritten = 2 };
constexpr const char* kDamaged = "damaged";
constexpr const char* kCutOff = "cut_off";

std::array<std::byte, kEntryBytes> entryOfSlot(uint64_t sample, uint32_t version, uint32_t digest, State state) {
  std::array<std::byte, kEntryBytes> entry{};
  put(entry.data(), 0, sample);
  put(entry.data(), 8, version);
  put(entry.data(), 12, digest);
  put(entry.data(), 16, static_cast<uint32_t>(state));
  put(entry.data(), 28, crc32c(entry.data(), 28));
  return entry;
}

}  // namespace

FileStore::FileStore(const std::string& path, const SlotFileHeader& header)
    : path_(path), slot_bytes_(header.slot_bytes) {
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file_ < 0) fail("open", errno);
  try {
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
      fail(errno == EWOULDBLOCK ? "lock, which another cache has open," : "lock", errno);
    }
    if (fileBytes() == 0) {
      create(header);
    } else {
      expectSame(header, readHeader(), path_);
      findSlots();
    }
  } catch (...) {
    ::close(file_);
    throw;
  }
}

FileStore::FileStore(const std::string& path) : path_(path), slot_bytes_(0) {
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) fail("open", errno);
}

FileStore::~FileStore() {
  if (file_ >= 0) ::close(file_);
}

SlotFileHeader FileStore::headerOf(const std::string& path) {
  return FileStore(path).readHeader();
}

void FileStore::create(const SlotFileHeader& header) {
  const auto bytes = bytesOf(header, path_);
  try {
    writeAt(0, bytes.data(), bytes.size());
  } catch (const FileError&) {
    if (::ftruncate(file_, 0) != 0) throw;  // part of a header would be refused ever after
    throw;
  }
}

SlotFileHeader FileStore::readHeader() const {
  std::array<std::byte, kSlotFileHeaderBytes> bytes{};
  return parseSlotFileHeader({bytes.data(), readAt(0, bytes.data(), bytes.size())}, path_);
}

uint64_t FileStore::fileBytes() const {
  struct stat status;
  if (::fstat(file_, &status) != 0) fail("measure", errno);
  return static_cast<uint64_t>(status.st_size);
}

void FileStore::findSlots() {
  std::vector<std::byte> slot(slot_bytes_);
  const uint64_t bytes = fileBytes();
  for (uint64_t first = 0; entryOf(first) < bytes; first += kGroup) {
    std::array<std::byte, kIndexBytes> index{};
    readAt(entryOf(first), index.data(), index.size());
    for (uint64_t i = 0; i < kGroup; ++i) {
      Entry entry;
      std::memcpy(entry.data(), index.data() + i * kEntryBytes, kEntryBytes);
      findSlot(first + i, entry, slot.data());
    }
    end_ = first + kGroup;
  }
  std::reverse(free_.begin(), free_.end());  // the first places are used first
}

void FileStore::findSlot(uint64_t place, const Entry& entry, std::byte* slot) {
  const auto lost = [&](const char* why) {
    ++forgotten_[why];
    writeEntry(place, Entry{});
    free_.push_back(place);
  };
  if (entry == Entry{}) return free_.push_back(place);
  if (get<uint32_t>(entry.data(), 28) != crc32c(entry.data(), 28)) return lost(kDamaged);
  if (get<uint32_t>(entry.data(), 16) != kWritten) return lost(kCutOff);
  const uint64_t sample = get<uint64_t>(entry.data(), 0);
  const Slot found{place, get<uint32_t>(entry.data(), 8), get<uint32_t>(entry.data(), 12)};
  if (readAt(offsetOf(place), slot, slot_bytes_) < slot_bytes_ || crc32c(slot, slot_bytes_) != found.digest ||
      found.version == 0 || slots_.contains(sample)) {
    return lost(kDamaged);
  }
  slots_[sample] = found;
}

uint64_t FileStore::entryOf(uint64_t place) const {
  const uint64_t stride = (slot_bytes_ + 63) / 64 * 64;
  return kSlotFileHeaderBytes + place / kGroup * (kIndexBytes + kGroup * stride) + place % kGroup * kEntryBytes;
}

uint64_t FileStore::offsetOf(uint64_t place) const {
  const uint64_t stride = (slot_bytes_ + 63) / 64 * 64;
  return entryOf(place / kGroup * kGroup) + kIndexBytes + place % kGroup * stride;
}

uint32_t FileStore::version(uint64_t sample) const {
  std::lock_guard<std::mutex> lock(mutex_);
  expectOpen();
  const auto slot = slots_.find(sample);
  return slot == slots_.end() ? 0 : slot->second.version;
}

void FileStore::read(uint64_t sample, std::byte* to) {
  Slot slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    expectOpen();
    slot = slots_.at(sample);
  }
  size_t bytes = 0;
  try {
    bytes = readAt(offsetOf(slot.place), to, slot_bytes_);
  } catch (const FileError&) {
    freeSlot(sample, kDamaged);
    throw;
  }
  const uint32_t digest = crc32c(to, bytes);
  if (bytes == slot_bytes_ && digest == slot.digest) return;
  freeSlot(sample, kDamaged);
  fail("read sample " + std::to_string(sample) + " of version " + std::to_string(slot.version) + ": expected " +
           std::to_string(slot_bytes_) + " bytes with digest " + std::to_string(slot.digest) + ", got " +
           std::to_string(bytes) + " with " + std::to_string(digest) + "; it is forgotten:",
       EIO);
}

void FileStore::write(uint64_t sample, uint32_t version, const std::byte* from) {
  Slot slot{0, version, crc32c(from, slot_bytes_)};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    expectOpen();
    const auto known = slots_.find(sample);
    slot.place = known == slots_.end() ? freePlace() : known->second.place;
  }
  try {
    writeEntry(slot.place, entryOfSlot(sample, version, slot.digest, kBeingWritten));
    writeAt(offsetOf(slot.place), from, slot_bytes_);
    writeEntry(slot.place, entryOfSlot(sample, version, slot.digest, kWritten));
  } catch (const FileError&) {  // its entry says so, and nobody is to read the slot
    std::lock_guard<std::mutex> lock(mutex_);
    slots_.erase(sample);
    free_.push_back(slot.place);
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  slots_[sample] = slot;
}

// With the lock.
uint64_t FileStore::freePlace() {
  if (free_.empty()) return end_++;
  const uint64_t place = free_.back();
  free_.pop_back();
  return place;
}

void FileStore::forget(uint64_t sample) {
  freeSlot(sample, nullptr);
}

// `why`, unless null, is counted.
void FileStore::freeSlot(uint64_t sample, const char* why) {
  uint64_t place;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    expectOpen();
    const auto slot = slots_.find(sample);
    if (slot == slots_.end()) return;
    place = slot->second.place;
    slots_.erase(slot);
    if (why) ++forgotten_[why];
    suspect_ = suspect_ || why;
  }
  writeEntry(place, Entry{});
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(place);
}

std::vector<SlotSummary> FileStore::table() const {
  std::lock_guard<std::mutex> lock(mutex_);
  expectOpen();
  std::vector<SlotSummary> table;
  for (const auto& [sample, slot] : slots_)
    table.push_back({sample, slot.version, slot.digest});
  return table;
}

void FileStore::recheck() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!std::exchange(suspect_, false)) return;
  }
  std::vector<std::byte> slot(slot_bytes_);
  for (const SlotSummary& known : table()) {
    try {
      read(known.sample, slot.data());
    } catch (const FileError&) {  // it is forgotten, and counted
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  suspect_ = false;
}

uint64_t FileStore::slots() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slots_.size();
}

std::map<std::string, uint64_t> FileStore::forgotten() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return forgotten_;
}

void FileStore::flush() {
  expectOpen();
  if (::fdatasync(file_) != 0) fail("flush", errno);
}

void FileStore::close() {
  if (file_ < 0) return;
  flush();
  ::close(file_);
  file_ = -1;
}

void FileStore::writeEntry(uint64_t place, const Entry& entry) const {
  writeAt(entryOf(place), entry.data(), entry.size());
}

void FileStore::writeAt(uint64_t at, const std::byte* from, size_t bytes) const {
  for (size_t done = 0; done < bytes;) {
    const ssize_t written = ::pwrite(file_, from + done, bytes - done, static_cast<off_t>(at + done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0)
      fail("write " + std::to_string(bytes) + " bytes at byte " + std::to_string(at) + " of",
           written < 0 ? errno : ENOSPC);
    done += static_cast<size_t>(written);
  }
}

// Bytes that were there.
size_t FileStore::readAt(uint64_t at, std::byte* to, size_t bytes) const {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = ::pread(file_, to + done, bytes - done, static_cast<off_t>(at + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read " + std::to_string(bytes) + " bytes at byte " + std::to_string(at) + " of", errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

void FileStore::fail(const std::string& doing, int code) const {
  throw FileError("slot file: could not " + doing + " '" + path_ + "': " + std::strerror(code), path_, code);
}

void FileStore::expectOpen() const {
  if (file_ < 0) throw ValueError("slot file '" + path_ + "': expected an open file, got one that was closed");
}

}  // namespace lowcomm

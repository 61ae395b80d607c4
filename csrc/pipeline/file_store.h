#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "pipeline/slot_file_header.h"
#include "pipeline/slot_store.h"

namespace lowcomm {

// Slots in a sparse file, found again after a restart (SLOT_FILE.md has its bytes). A process that is killed leaves
// each slot as it was before the write, as it is after it, or forgotten. Slots are read and written through the page
// cache by calls, not through a mapping: a disk error, or a file that another process truncates, then raises FileError
// and not SIGBUS.
//
// Thread-safe for different samples; one thread at a time reads or writes a sample. Each slot takes about 60 bytes of
// memory.
class FileStore final : public SlotStore {
 public:
  // Opens a file, which it creates if it is missing or empty, and reads all its slots once. FileError if the system
  // refuses, also for a file that another store has open; ValueError, with expected and got, for a file that is
  // truncated within its header, or of another kind, byte order, version, run, place, format or size.
  FileStore(const std::string& path, const SlotFileHeader& header);
  ~FileStore() override;

  // The header of a file that is there, for a caller who does not know what it is of. Throws as the constructor.
  static SlotFileHeader headerOf(const std::string& path);

  uint32_t version(uint64_t sample) const override;
  void read(uint64_t sample, std::byte* to) override;
  void write(uint64_t sample, uint32_t version, const std::byte* from) override;
  void forget(uint64_t sample) override;
  std::vector<SlotSummary> table() const override;
  uint64_t slots() const override;
  std::map<std::string, uint64_t> forgotten() const override;
  void recheck() override;
  void flush() override;
  void close() override;

 private:
  struct Slot {
    uint64_t place = 0;
    uint32_t version = 0;
    uint32_t digest = 0;
  };
  using Entry = std::array<std::byte, 32>;

  explicit FileStore(const std::string& path);  // to read the header alone
  void create(const SlotFileHeader& header);
  SlotFileHeader readHeader() const;
  uint64_t fileBytes() const;
  void findSlots();
  void findSlot(uint64_t place, const Entry& entry, std::byte* slot);

  uint64_t offsetOf(uint64_t place) const;  // of a place's slot
  uint64_t entryOf(uint64_t place) const;   // of its entry
  uint64_t freePlace();
  void freeSlot(uint64_t sample, const char* why);
  void writeEntry(uint64_t place, const Entry& entry) const;
  void writeAt(uint64_t at, const std::byte* from, size_t bytes) const;
  size_t readAt(uint64_t at, std::byte* to, size_t bytes) const;
  [[noreturn]] void fail(const std::string& doing, int code) const;
  void expectOpen() const;

  const std::string path_;
  const size_t slot_bytes_;
  int file_ = -1;
  mutable std::mutex mutex_;  // of all below; no file is read or written under it
  std::map<uint64_t, Slot> slots_;
  std::vector<uint64_t> free_;  // places below end_
  uint64_t end_ = 0;            // places from here on were never used
  std::map<std::string, uint64_t> forgotten_;
  bool suspect_ = false;  // a slot was damaged, and others may be
};

}  // namespace lowcomm

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "pipeline/slot_store.h"

namespace lowcomm {

// Slots that are read before they are asked for: those of the last two batches. Not thread-safe: its store's lock
// guards it.
class SlotsAhead {
 public:
  using Bytes = std::shared_ptr<std::vector<std::byte>>;

  // The samples of the next batch, each of which take() asks for as often as it stands there.
  void want(const std::vector<uint64_t>& samples);

  // The bytes of a sample, null if they are not there; one of its wishes is fulfilled.
  Bytes take(uint64_t sample);

  // The samples to read, in the order of want(); stop() empties the queue.
  bool hasNext() const { return !to_read_.empty(); }
  uint64_t next();
  void stop() { to_read_.clear(); }

  // Whether the bytes of a sample are wanted and not there; keep() gives them, if they are wanted.
  bool lacks(uint64_t sample) const;
  void keep(uint64_t sample, const Bytes& bytes);

  // The bytes of a sample are no longer its last ones; it is no longer wanted, nor are those for which `gone` holds.
  void outdate(uint64_t sample) { keep(sample, nullptr); }
  void forget(uint64_t sample) { wanted_.erase(sample); }
  void forgetIf(const std::function<bool(uint64_t sample)>& gone);

 private:
  struct Wanted {
    uint64_t round = 0;   // the last call of want() that asked for it
    uint32_t wishes = 0;  // calls whose take() has not come
    Bytes bytes;          // null until they are there
  };

  std::map<uint64_t, Wanted> wanted_;
  std::deque<uint64_t> to_read_;
  uint64_t round_ = 0;
};

// A store in front of a slower one: slots are read before they are asked for, and written behind the caller, by a
// thread of its own. A slot that waits to be written is read from there, so that a sample which comes again in the next
// batch is never read before its write.
//
// Memory: the slots of the last two calls of readAhead(), and at most `most_waiting` that wait to be written, or are.
//
// What fails behind the caller is thrown by the next check(), flush() or close(), once: FileError. A slot whose write
// failed is forgotten and counted as "not_written". A caller waits for the other store while that goes on; FileError
// where nothing has been read or written for a minute.
class BufferedStore final : public SlotStore {
 public:
  // `path` is what errors name.
  BufferedStore(std::unique_ptr<SlotStore> store, size_t slot_bytes, size_t most_waiting, std::string path);

  // Writes what waits; an error is lost here, and not in close().
  ~BufferedStore() override;

  uint32_t version(uint64_t sample) const override;
  void read(uint64_t sample, std::byte* to) override;
  void write(uint64_t sample, uint32_t version, const std::byte* from) override;
  void forget(uint64_t sample) override;
  std::vector<SlotSummary> table() const override;
  uint64_t slots() const override;
  std::map<std::string, uint64_t> forgotten() const override;
  void readAhead(const std::vector<uint64_t>& samples) override;
  ReadCounts reads() const override;
  void recheck() override;
  void check() override;
  void flush() override;
  void close() override;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Bytes = SlotsAhead::Bytes;
  struct Write {
    uint32_t version = 0;
    Bytes bytes;
  };

  void work();
  void writeNext(Lock& lock);
  void readNext(Lock& lock);
  void keepAhead(uint64_t sample, const Bytes& bytes);
  uint32_t versionOf(uint64_t sample) const;
  void throwFailure();
  void drain(Lock& lock) const;
  template <class Done>
  void await(Lock& lock, const char* doing, Done done) const;

  const std::unique_ptr<SlotStore> store_;
  const size_t slot_bytes_, most_waiting_;
  const std::string path_;
  const int process_;         // that made it
  mutable std::mutex mutex_;  // of all below; neither is held while the other store reads or writes a slot
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::map<uint64_t, Write> writes_;  // by sample, until they are written
  std::deque<uint64_t> to_write_;     // a sample once for each write
  SlotsAhead ahead_;
  uint64_t done_ = 0;     // slots read and written behind the caller
  bool working_ = false;  // on `sample_`
  uint64_t sample_ = 0;
  uint64_t slots_;  // those of the other store, and those that wait to be its
  ReadCounts reads_;
  uint64_t not_written_ = 0;
  std::exception_ptr failure_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace lowcomm

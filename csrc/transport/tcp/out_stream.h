#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

#include "transport/tcp/wire.h"

namespace lowcomm::tcp {

// The bytes of a channel to its peer: records, and behind some the bytes of a message, which stay where their sender
// has them. A byte is known by its offset, counted from the channel's beginning, whichever connections carry it.
//
// Not thread-safe: its channel's lock guards it.
class OutStream {
 public:
  // Bytes of the stream: that the peer has received; that there are, those included.
  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }

  // `data` has record.bytes bytes for a record that has a body, else none. `place`: MessageStream::send.
  void append(const Record& record, std::span<const std::byte> data, uint64_t place);

  // The next piece, which is to begin at `offset` and to have at most `most` bytes of the stream: how many it has. They
  // count as promised, until resume().
  size_t promise(uint64_t offset, size_t most);

  // Fills in where up to `bytes` bytes of the stream from `offset` on are; returns how many of `parts`.
  size_t gather(uint64_t offset, size_t bytes, std::span<iovec> parts) const;

  // The place of the message that the byte at `offset` belongs to; 0 of a word about one. The stream has that byte.
  uint64_t placeOf(uint64_t offset) const;

  // The peer has received the stream up to `offset`. WireError for less than before or more than was promised.
  void received(uint64_t offset);

  // received() as told by the first bytes of another connection, which continues from there.
  void resume(uint64_t offset);

  void clear();

 private:
  // A record's header, or the bytes that follow it.
  struct Part {
    uint64_t begin = 0, place = 0;
    size_t size = kRecordHeaderBytes;
    std::array<std::byte, kRecordHeaderBytes> header = {};
    const std::byte* data = nullptr;  // null: the part is the header
    uint64_t end() const { return begin + size; }
    const std::byte* at(uint64_t offset) const { return (data ? data : header.data()) + (offset - begin); }
  };

  std::deque<Part>::const_iterator partAt(uint64_t offset) const;

  std::deque<Part> parts_;
  uint64_t begin_ = 0, end_ = 0;
  uint64_t promised_ = 0;  // the end of the last piece
};

}  // namespace lowcomm::tcp

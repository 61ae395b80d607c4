#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "transport/tcp/wire.h"

namespace lowcomm::tcp {

// The bytes of a channel to its peer: records, and behind some the bytes of a message, which stay where their sender
// has them. A byte is known by its offset, counted from the channel's beginning, whichever connections carry it.
//
// A message may be given up at any time, and its sender's bytes are touched no more. What a connection has promised of
// it, in the header of a piece, still has to travel: at most kPieceBytes are copied for that. The rest never does: the
// stream has a cut there, at which the receiver expects the next record (Piece::cut). After a connection is lost, the
// message ends where the peer has come to, for the bytes before the piece are not here any more; so a cut moves to
// lower offsets, and what is behind it too, but only to offsets that no peer has seen.
//
// Not thread-safe: its channel's lock guards it.
class OutStream {
 public:
  // Bytes of the stream: that the peer has received; that there are, those included.
  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }

  // `data` has record.bytes bytes for a record that has a body, else none. `place`: MessageStream::send.
  void append(const Record& record, std::span<const std::byte> data, uint64_t place);

  // The next piece, which is to begin at `offset` and to have at most `most` bytes of the stream: how many bytes it
  // has, and whether it begins behind a cut. They count as promised, until resume().
  struct Promise {
    size_t bytes = 0;
    bool cut = false;
  };
  Promise promise(uint64_t offset, size_t most);

  // Fills in where up to `bytes` bytes of the stream from `offset` on are; returns how many of `parts`. They are of the
  // piece that was promised last.
  size_t gather(uint64_t offset, size_t bytes, std::span<iovec> parts) const;

  // The place of the message that the byte at `offset` belongs to; 0 of a word about one. The stream has that byte.
  uint64_t placeOf(uint64_t offset) const;

  // The peer has received the stream up to `offset`. WireError for less than before or more than was promised.
  void received(uint64_t offset);

  // received() as told by the first bytes of another connection, which continues from there.
  void resume(uint64_t offset);

  // Whether bytes of a message are in the stream that the peer has not received.
  bool has(uint64_t number) const;

  // Gives up the bytes of these messages, in ascending order, that are in the stream. Where not even its header was
  // promised, a message is offered in place of being sent. There has to be a record behind all, for the cuts to be
  // before.
  void giveUp(std::span<const uint64_t> numbers);

  void clear();

 private:
  // A record's header, or the bytes that follow it.
  struct Part {
    uint64_t begin = 0, place = 0, number = 0;
    size_t size = kRecordHeaderBytes;
    bool is_header = true, of_message = false;  // of_message: it is, or is followed by, bytes of message `number`
    bool given_up = false, after_cut = false;
    std::array<std::byte, kRecordHeaderBytes> header = {};
    const std::byte* data = nullptr;
    std::vector<std::byte> own = {};  // of a message that was given up: what was promised, `own_from` its first byte
    uint64_t own_from = 0;
    uint64_t end() const { return begin + size; }
    const std::byte* at(uint64_t offset) const;
  };

  std::deque<Part>::const_iterator partAt(uint64_t offset) const;
  void recut(uint64_t fixed);
  void keepPromised(Part& part);

  std::deque<Part> parts_;
  uint64_t begin_ = 0, end_ = 0;
  uint64_t promised_from_ = 0, promised_ = 0;  // the last piece
  bool has_given_up_ = false;
};

}  // namespace lowcomm::tcp

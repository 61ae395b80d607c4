#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/codec.h"

namespace lowcomm {

// Walks over a run in pieces that stay in the first-level cache, and between the whole run's payload and the pieces'
// own: what is encoded or decoded piece by piece has the bytes and values of the whole (FORMAT.md, "Cutting a tensor").
// Payloads are those of float32 elements. A codec that says nothing of how payloads are joined has one piece, the run.
//
//   for (Pieces piece(codec, count); piece.more(); piece.next()) ...
class Pieces {
 public:
  // `codec` outlives the walk.
  Pieces(const Codec& codec, uint64_t count) : Pieces(codec, count, 0, count) {}

  // The same over `size` elements of the run from `first` on, a multiple of the codec's granularity; the part ends at
  // another one or with the run. Of a codec with one piece it is the run.
  Pieces(const Codec& codec, uint64_t count, uint64_t first, uint64_t size);

  bool more() const { return at_ < end_; }
  void next();

  uint64_t at() const { return at_; }  // first element, counted in the run
  uint64_t size() const { return size_; }
  size_t bytes() const { return bytes_; }  // of the piece's own payload

  // Where the piece's own payload is to be made: in `whole` itself where it is the only one, else in `scratch`, from
  // which `put` moves it to its places.
  std::span<std::byte> room(std::span<std::byte> whole, std::vector<std::byte>& scratch) const;
  void put(std::span<std::byte> whole, std::span<const std::byte> own) const;

  // The piece's own payload, taken from the whole; in `scratch` where it is not the only one.
  std::span<const std::byte> get(std::span<const std::byte> whole, std::vector<std::byte>& scratch) const;

 private:
  void measure();
  bool only() const { return size_ == count_; }

  const Codec& codec_;
  uint64_t count_, step_, at_, end_, size_ = 0;
  size_t bytes_ = 0, head_ = 0;       // of the piece: its payload, the metadata in front of it
  size_t head_at_ = 0, body_at_ = 0;  // in the whole payload
};

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/pieces.h"

namespace lowcomm {

// The residual of a tensor, kept as the codes of one run over it: what was kept before an op, and room for what the op
// leaves. Parts are read and written by themselves, and no fp32 copy of the whole is made. What the codes lose of a
// residual is lost. One thread at a time; the memory is the caller's.
class CodedResidual {
 public:
  // The codec of every residual in 8 bits: a scale every 512 elements, at which every codec's runs begin and end.
  static constexpr const char* kEightBits = "sym8:bucket=512";

  // `kept` and `next` are of codec->encodedBytes(elements, float32) bytes. `codec` outlives this, and has pieces.
  // `decay` multiplies what is written.
  CodedResidual(const Codec& codec, uint64_t elements, std::span<const std::byte> kept, std::span<std::byte> next,
                float decay = 1)
      : codec_(codec), elements_(elements), kept_(kept), next_(next), decay_(decay) {}

  // out = the elements [first, first + count) as they were kept; `first` is a multiple of the codec's granularity, and
  // so is the end unless it is the tensor's. WireError for invalid codes.
  void read(uint64_t first, uint64_t count, float* out) const {
    if (count == 0) return;
    for (Pieces piece(codec_, elements_, first, count); piece.more(); piece.next()) {
      codec_.decode(out + (piece.at() - first), DType::float32, piece.get(kept_, piece_), piece.at(), piece.size());
    }
  }

  // Keeps x·decay as those elements. NonFiniteError for a NaN or an infinity.
  void write(uint64_t first, uint64_t count, const float* x) const {
    if (count == 0) return;
    for (Pieces piece(codec_, elements_, first, count); piece.more(); piece.next()) {
      const std::span<std::byte> own = piece.room(next_, piece_);
      const float* from = x + (piece.at() - first);
      if (decay_ != 1) {
        decayed_.assign(from, from + piece.size());
        for (float& element : decayed_)
          element *= decay_;
        from = decayed_.data();
      }
      codec_.encode(own, from, DType::float32, piece.at(), piece.size(), {});
      piece.put(next_, own);
    }
  }

 private:
  const Codec& codec_;
  const uint64_t elements_;
  const std::span<const std::byte> kept_;
  const std::span<std::byte> next_;
  const float decay_;
  mutable std::vector<std::byte> piece_;  // a piece's own payload
  mutable std::vector<float> decayed_;    // elements of a piece
};

}  // namespace lowcomm

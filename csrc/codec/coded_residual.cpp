#include "codec/coded_residual.h"

#include "codec/pieces.h"

namespace lowcomm {

void CodedResidual::read(uint64_t first, uint64_t count, float* out) const {
  if (count == 0) return;
  for (Pieces piece(codec_, elements_, first, count); piece.more(); piece.next()) {
    codec_.decode(out + (piece.at() - first), DType::float32, piece.get(kept_, piece_), piece.at(), piece.size());
  }
}

void CodedResidual::write(uint64_t first, uint64_t count, const float* x) const {
  if (count == 0) return;
  for (Pieces piece(codec_, elements_, first, count); piece.more(); piece.next()) {
    const std::span<std::byte> own = piece.room(next_, piece_);
    codec_.encode(own, x + (piece.at() - first), DType::float32, piece.at(), piece.size(), {});
    piece.put(next_, own);
  }
}

}  // namespace lowcomm

#include "codec/codec.h"

#include <string>
#include <vector>

#include "base/error.h"
#include "codec/float_codec.h"
#include "codec/grid.h"
#include "codec/none.h"
#include "codec/pieces.h"

namespace lowcomm {

Codec::Codec(const CodecSpec& spec) : spec_(spec) {
  if (const auto why = misfit(spec)) throw ValueError(spec.str() + ": " + *why);
}

std::shared_ptr<const Codec> makeCodec(const CodecSpec& spec) {
  return makeCodec(spec, kernels());
}

std::shared_ptr<const Codec> makeCodec(const CodecSpec& spec, const KernelTable& table) {
  if (spec.id == CodecId::none) return std::make_shared<NoneCodec>(spec);
  if (isGrid(spec.id) && spec.axis == Axis::channel) return makeChannelCodec(spec, table);
  if (isGrid(spec.id)) return std::make_shared<GridCodec>(spec, table);
  if (isCast(spec.id)) return makeCastCodec(spec, table);
  if (spec.id == CodecId::topk) return makeTopkCodec(spec, table);
  if (spec.id == CodecId::logbyte || spec.id == CodecId::log9) {
    return makeScalarCodec(spec, table);
  }
  throw ValueError("codec number: expected one of " + codecNames() + ", got " +
                   std::to_string(static_cast<int>(spec.id)));
}

void Codec::encodeMade(std::span<std::byte> dst, const MakePiece& make, uint64_t first, uint64_t count,
                       const Draws& draws) const {
  std::vector<std::byte> payload;
  for (Pieces piece(*this, count); piece.more(); piece.next()) {
    const Piece made = make(piece.at(), piece.size());
    const std::span<std::byte> own = piece.room(dst, payload);
    encode(own, made.x, DType::float32, first + piece.at(), piece.size(), draws);
    piece.put(dst, own);
  }
}

std::shared_ptr<const Codec> Codec::with(const LevelTable&) const {
  throw ValueError(spec_.str() + ": expected no level table, got one");
}

std::string codecNames() {
  std::string names = "none";
  for (const GridFamily& family : kGridFamilies) {
    const std::string name(family.name);
    names += ", " + name;
    if (family.named()) names += std::to_string(family.least_bits);
    if (family.least_bits != family.most_bits) names += "..." + name + std::to_string(family.most_bits);
  }
  for (const PlainFamily& family : kPlainFamilies)
    names += ", " + std::string(family.name);
  return names;
}

}  // namespace lowcomm

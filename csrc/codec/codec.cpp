#include "codec/codec.h"

#include <bit>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "codec/float_codec.h"
#include "codec/grid.h"
#include "codec/nonfinite.h"
#include "codec/pieces.h"

namespace lowcomm {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian and are copied as they stand");

namespace {

constexpr const char* kName = "none";

}  // namespace

size_t NoneCodec::encodedBytes(uint64_t count, DType dtype) const {
  return up64(count * itemBytes(dtype));
}

void NoneCodec::encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t, uint64_t count,
                       const Draws&) const {
  if (!supports(dtype)) throw TypeError("none: expected an element type, got " + std::string(dtypeName(dtype)));
  expectBytes<ValueError>(kName, encodedBytes(count, dtype), dst.size());
  const size_t bytes = count * itemBytes(dtype);
  if (bytes == 0) return;
  std::memcpy(dst.data(), src, bytes);
  std::memset(dst.data() + bytes, 0, dst.size() - bytes);
}

std::span<const std::byte> NoneCodec::elements(DType dtype, std::span<const std::byte> src, uint64_t count) {
  if (itemBytes(dtype) == 0) throw TypeError("none: expected an element type, got " + std::string(dtypeName(dtype)));
  const size_t bytes = count * itemBytes(dtype);
  expectBytes<WireError>(kName, up64(bytes), src.size());
  expectZero(src.subspan(bytes), kName, "padding");
  return src.first(bytes);
}

void NoneCodec::decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t, uint64_t count) const {
  const std::span<const std::byte> from = elements(dtype, src, count);
  if (!from.empty()) std::memcpy(dst, from.data(), from.size());
}

void NoneCodec::decodeAdd(float*, DType, std::span<const std::byte>, uint64_t, uint64_t) const {
  throw TypeError("none: expected a codec whose values are fp32, got exact elements to add");
}

Codec::Codec(const CodecSpec& spec) : spec_(spec) {
  if (const auto why = misfit(spec)) throw ValueError(spec.str() + ": " + *why);
}

std::shared_ptr<const Codec> makeCodec(const CodecSpec& spec) {
  return makeCodec(spec, kernels());
}

std::shared_ptr<const Codec> makeCodec(const CodecSpec& spec, const KernelTable& table) {
  if (spec.id == CodecId::none) return std::make_shared<NoneCodec>(spec);
  if (isGrid(spec.id) && spec.unit != 0) return makeUnitCodec(spec, table);
  if (isGrid(spec.id) && spec.axis == Axis::channel) return makeChannelCodec(spec, table);
  if (isGrid(spec.id)) return std::make_shared<GridCodec>(spec, table);
  if (isCast(spec.id)) return makeCastCodec(spec, table);
  if (spec.id == CodecId::topk && spec.bucket != 0) return makeChunkedTopkCodec(spec, table);
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
    names += ", " + name + std::to_string(family.least_bits);
    if (family.least_bits != family.most_bits) names += "..." + name + std::to_string(family.most_bits);
  }
  for (const PlainFamily& family : kPlainFamilies)
    names += ", " + std::string(family.name);
  return names;
}

}  // namespace lowcomm

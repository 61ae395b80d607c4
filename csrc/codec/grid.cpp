#include "codec/grid.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/float_env.h"
#include "codec/nonfinite.h"
#include "kernels/finite.h"

namespace lowcomm {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian and are copied as they stand");

namespace {

// 16-bit elements are converted, and any rotated, this many at a time, or a bucket where that is more: it stays in the
// cache, and a bucket's statistics see all of it, so the bytes are those of converting everything first.
constexpr uint64_t kPiece = 1024;

uint64_t pieceOf(uint32_t bucket, uint64_t count) {
  return std::min<uint64_t>(std::max<uint64_t>(kPiece, bucket), count);
}

constexpr uint64_t wholeBlocks(uint64_t count) {
  return (count + kCodeBlock - 1) / kCodeBlock * kCodeBlock;
}

// Zeros the padding between a payload's metadata and its codes. Returns where the codes begin.
std::byte* clearedPadding(std::span<std::byte> payload, size_t meta) {
  std::memset(payload.data() + meta, 0, up64(meta) - meta);
  return payload.data() + up64(meta);
}

// Lanes from `held` on of a rotated block held no element: the first one's values, for they must not count among a
// bucket's smallest and largest. Their codes are cleared afterwards.
void fillLanes(float* block, uint64_t held) {
  for (uint64_t row = 0; row < kCodeBlock; row += kCodeLanes)
    std::fill(block + row + held, block + row + kCodeLanes, block[row]);
}

void clearLanes(std::byte* block, uint64_t bytes, uint64_t held) {
  for (uint64_t row = 0; row < bytes; row += 64)
    std::memset(block + row + held * 4, 0, 64 - held * 4);
}

}  // namespace

GridCodec::GridCodec(const CodecSpec& spec, const KernelTable& table, std::optional<uint32_t> part)
    : FloatCodec(spec, table),
      bucket_(part.value_or(spec.bucket)),
      rows_(std::min(kAllRows, std::countr_zero(bucket_ | kCodeBlock) - 4)),
      of_units_(part.has_value()),
      form_(gridForm(spec)),
      scales_(spec) {
  if (spec.axis != Axis::flat) throw ValueError(name() + ": axis: expected none of a flat codec, got channel");
  const GridFamily& family = *gridFamily(spec.id);
  const size_t width = spec.bits - 1;
  // The other forms have no buckets below 64. Units of less, and what is left of others, take the reference's loops.
  const KernelTable& loops = bucket_ == kTensorBucket || bucket_ >= 64 ? table : *scalarKernels();
  if (family.book) {
    const auto rule = static_cast<size_t>(spec.id == CodecId::gauss ? CodebookRule::gauss : CodebookRule::levels);
    encode_ = loops.codebooks->encode[width][rule];
    decode_ = loops.codebooks->decode[width][rule];
  } else {
    encode_ = loops.encode_grid[width][static_cast<size_t>(gridRule(family))];
    decode_ = (family.centred ? loops.decode_centred : loops.decode_grid)[width];
  }
}

GridCodec::GridCodec(const CodecSpec& spec, const KernelTable& table, const LevelTable& levels)
    : GridCodec(spec, table) {
  if (!needsTable(spec)) throw ValueError(name() + ": expected no level table, got one");
  if (levels.bits() != spec.bits) {
    throw ValueError(name() + ": level table: expected " + std::to_string(1 << spec.bits) + " values, got " +
                     std::to_string(levels.values().size()));
  }
  const auto book = std::make_shared<Codebook>();
  FloatEnv env;
  makeLevels(*book, spec.bits, levels.values().data());
  form_.book = book.get();
  book_ = book;
  version_ = levels.version();
}

std::shared_ptr<const Codec> GridCodec::with(const LevelTable& levels) const {
  return std::make_shared<GridCodec>(spec(), table(), levels);
}

uint64_t GridCodec::granularity() const {
  return bucket_ == kTensorBucket ? kUncut : std::max<uint64_t>(kCodeBlock, bucket_);
}

// One bucket for a whole tensor (bucket=tensor) is a bucket that the tensor is no longer than.
uint32_t GridCodec::bucketOf(uint64_t count) const {
  if (bucket_ != kTensorBucket) return bucket_;
  if (count > kLongestTensor) {
    throw ValueError(name() + ": expected a tensor of at most " + std::to_string(kLongestTensor) + " elements, got " +
                     std::to_string(count));
  }
  return std::bit_ceil(std::max(static_cast<uint32_t>(count), 64u));
}

GridForm GridCodec::formOf(uint64_t count) const {
  GridForm form = form_;
  form.bucket = bucketOf(count);
  return form;
}

uint64_t GridCodec::codes(uint64_t count) const {
  return wholeBlocksOnly() ? wholeBlocks(count) : count;
}

size_t GridCodec::metaBytes(uint64_t count) const {
  const uint64_t bucket = bucketOf(count);
  return scales_.bytes((count + bucket - 1) / bucket);
}

size_t GridCodec::wordBytes(uint64_t codes) const {
  return gridWordBytes(spec().bits, codes);
}

std::optional<size_t> GridCodec::headBytes(uint64_t count, DType) const {
  return bucket_ == kTensorBucket ? std::nullopt : std::optional(metaBytes(count));
}

size_t GridCodec::encodedBytes(uint64_t count, DType) const {
  return up64(metaBytes(count)) + wordBytes(codes(count));
}

void GridCodec::checkRun(DType dtype, uint64_t first) const {
  FloatCodec::checkRun(dtype, first);
  if (needsTable(spec()) && !book_) throw ValueError(name() + ": expected a level table, got none");
}

void GridCodec::encodeMade(std::span<std::byte> dst, const MakePiece& make, uint64_t first, uint64_t count,
                           const Draws& draws) const {
  if (!begin(dst, DType::float32, first, count)) return;
  {
    FloatEnv env;
    if (encodePieces(dst, first, count, {draws.seed, draws.stream, draws.step}, make)) return;
  }
  Codec::encodeMade(dst, make, first, count, draws);  // finds what is wrong, or repairs it
}

bool GridCodec::encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                            const PhiloxKey& key) const {
  FloatEnv env;
  if (dtype == DType::float32) {
    const auto* x = static_cast<const float*>(src);
    if (isRotated(spec())) {
      return encodePieces(dst, first, count, key, [&](uint64_t at, uint64_t n) { return Piece{x + at, x + at + n}; });
    }
    std::byte* words = clearedPadding(dst, metaBytes(count));
    return encode_(dst.data(), words, x, count, formOf(count), first / kCodeBlock, key);
  }
  const auto* x = static_cast<const uint16_t*>(src);
  const auto scratch = std::make_unique_for_overwrite<float[]>(pieceOf(bucketOf(count), codes(count)));
  return encodePieces(dst, first, count, key, [&](uint64_t at, uint64_t n) {
    widening(dtype)(scratch.get(), x + at, n);
    return Piece{scratch.get(), x + at + n};
  });
}

std::vector<uint64_t> GridCodec::blankRefused(void* x, DType dtype, uint64_t count) const {
  return blank(x, dtype, count, bucketOf(count), finiteLimit(spec()));
}

void GridCodec::poison(std::span<std::byte> dst, uint64_t count, uint64_t bucket) const {
  const uint64_t all = codes(count), size = bucketOf(count), from = bucket * size;
  clearCodes(dst.subspan(up64(metaBytes(count))), spec().bits, from, std::min(size, all - from));
  scales_.poison(dst.data(), bucket);
}

bool GridCodec::encodePieces(std::span<std::byte> dst, uint64_t first, uint64_t count, const PhiloxKey& key,
                             const MakePiece& make) const {
  const uint64_t piece = pieceOf(bucketOf(count), codes(count));
  clearedPadding(dst, metaBytes(count));
  std::unique_ptr<float[]> rotated;
  if (isRotated(spec())) rotated = std::make_unique_for_overwrite<float[]>(piece);
  for (uint64_t at = 0; at < count; at += piece) {
    const uint64_t n = std::min(piece, count - at);
    if (!encodeAt({dst.data(), first, count}, at, make(at, n), n, rotated.get(), key)) return false;
  }
  return true;
}

bool GridCodec::encodeAt(const Payload& payload, uint64_t at, const Piece& made, uint64_t n, float* rotated,
                         const PhiloxKey& key) const {
  GridForm form = formOf(payload.count);
  form.soon = made.soon;
  const uint64_t block = (payload.first + at) / kCodeBlock;
  std::byte* meta = payload.bytes + metaBytes(at);
  std::byte* words = payload.bytes + up64(metaBytes(payload.count)) + wordBytes(at);
  if (!isRotated(spec())) return encode_(meta, words, made.x, n, form, block, key);
  return rotate()(rotated, made.x, n, blocks(at)) && encodeRotated(meta, words, rotated, n, form, block, key);
}

// x: the rotated blocks of `count` elements, the last ones of the run where that is no multiple of a block.
bool GridCodec::encodeRotated(std::byte* meta, std::byte* words, float* x, uint64_t count, GridForm form,
                              uint64_t block, const PhiloxKey& key) const {
  const uint64_t all = codes(count), held = count % kCodeBlock;
  if (held == 0 || held >= kCodeLanes) return encode_(meta, words, x, all, form, block, key);
  form.absent = kCodeBlock / kCodeLanes * (kCodeLanes - held);
  if (scales_.numbers == 2) fillLanes(x + all - kCodeBlock, held);
  if (!encode_(meta, words, x, all, form, block, key)) return false;
  clearLanes(words + wordBytes(all - kCodeBlock), wordBytes(kCodeBlock), held);
  return true;
}

void GridCodec::checkPayload(std::span<const std::byte> src, uint64_t count) const {
  expectBytes<WireError>(name(), encodedBytes(count, DType::float32), src.size());
  if (count == 0) return;
  const size_t meta = metaBytes(count), words = up64(meta);
  scales_.expectFinite(src.data(), meta / scales_.bytes(1), name(), "bucket");
  expectZero(src.subspan(meta, words - meta), name(), "metadata padding");
  expectUnusedZero(src.subspan(words), spec().bits, count, name(), wholeBlocksOnly());
}

void GridCodec::decodeTo(void* dst, DType dtype, std::span<const std::byte> src, uint64_t count) const {
  if (dtype != DType::float32) {
    decodePieces(src.data(), count, [&](float* values, uint64_t at, uint64_t n) {
      if (isRotated(spec())) unrotate(false)(values, values, n, blocks(at));
      if (isRotated(spec()) && spec().nonfinite == Nonfinite::poison) settleNans(values, n);
      narrowing(dtype)(static_cast<uint16_t*>(dst) + at, values, n);
    });
  } else if (isRotated(spec())) {
    // In place, where the memory that is written has been asked for; what is left of a block in memory of its own.
    const Payload payload{const_cast<std::byte*>(src.data()), 0, count};
    auto* y = static_cast<float*>(dst);
    const uint64_t whole = count / granularity() * granularity(), piece = pieceOf(bucketOf(count), codes(count));
    for (uint64_t at = 0; at < whole; at += piece)
      decodeAt(y + at, payload, at, std::min(piece, whole - at));
    if (whole == count) return;
    std::vector<float> rest(codes(count - whole));
    decodeAt(rest.data(), payload, whole, count - whole);
    std::copy_n(rest.begin(), count - whole, y + whole);
  } else {
    decode_[0](static_cast<float*>(dst), src.data(), src.data() + up64(metaBytes(count)), count, formOf(count));
  }
}

// A rotation's sums and signs make other NaNs of a poisoned bucket's: they are settled.
void GridCodec::decodeAt(float* y, const Payload& payload, uint64_t at, uint64_t n) const {
  const std::byte* words = payload.bytes + up64(metaBytes(payload.count)) + wordBytes(at);
  decode_[0](y, payload.bytes + metaBytes(at), words, codes(n), formOf(payload.count));
  if (!isRotated(spec())) return;
  unrotate(false)(y, y, n, blocks(at));
  if (spec().nonfinite == Nonfinite::poison) settleNans(y, n);
}

// Calls take(values, at, n) for runs of n elements from element `at` on: the values of their codes, which are rotated
// where the elements were.
template <typename Take>
void GridCodec::decodePieces(const std::byte* src, uint64_t count, const Take& take) const {
  const GridForm form = formOf(count);
  const uint64_t bucket = form.bucket, piece = std::min(kPiece, codes(count));
  const std::byte* words = src + up64(metaBytes(count));
  const auto scratch = std::make_unique_for_overwrite<float[]>(piece);
  for (uint64_t at = 0; at < count; at += piece) {
    const uint64_t n = std::min(piece, count - at);
    // A piece is of whole buckets or within one, from whose scale its own values are then made.
    const std::byte* meta = src + scales_.bytes(at / bucket);
    decode_[0](scratch.get(), meta, words + wordBytes(at), codes(n), form);
    take(scratch.get(), at, n);
  }
}

void GridCodec::addTo(float* acc, std::span<const std::byte> src, uint64_t count) const {
  if (isRotated(spec())) {
    decodePieces(src.data(), count,
                 [&](auto* values, auto at, auto n) { unrotate(true)(acc + at, values, n, blocks(at)); });
  } else {
    decode_[1](acc, src.data(), src.data() + up64(metaBytes(count)), count, formOf(count));
  }
}

}  // namespace lowcomm

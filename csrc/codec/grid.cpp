#include "codec/grid.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "codec/grid_payload.h"
#include "codec/nonfinite.h"
#include "codec/payload.h"
#include "codec/repair.h"
#include "kernels/finite.h"
#include "kernels/float_env.h"
#include "kernels/grid_scale.h"
#include "kernels/half.h"

namespace lowcomm {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian and are copied as they stand");

namespace {

constexpr uint64_t kBlock = 512;

// 16-bit elements are converted this many at a time, or a bucket where that is more: it stays in the cache, and a
// bucket's statistics see all of it, so the bytes are those of converting everything first.
constexpr uint64_t kPiece = 1024;

// One bucket for a whole tensor (bucket=tensor) is a bucket that no tensor is longer than.
constexpr uint64_t kLongest = uint64_t{1} << 31;

uint64_t pieceOf(uint32_t bucket, uint64_t count) {
  return std::min<uint64_t>(std::max<uint64_t>(kPiece, bucket), count);
}

}  // namespace

GridCodec::GridCodec(const CodecSpec& spec, const KernelTable& table)
    : Codec(spec), table_(table), name_(spec.str()), form_(gridFormOf(spec)) {
  if (const auto why = misfit(spec)) throw ValueError(name_ + ": " + *why);
  if (spec.axis != Axis::flat) throw ValueError(name_ + ": axis: expected a codec without one here");
  const GridFamily& family = *gridFamily(spec.id);
  encode_ = table.encode_grid[spec.bits - 1][static_cast<size_t>(gridRuleOf(family))];
  decode_ = (family.centred ? table.decode_centred : table.decode_grid)[spec.bits - 1];
  scales_ = family.centred ? 1 : 2;
  scale_bytes_ = form_.bf16 ? 2 : 4;
}

uint64_t GridCodec::granularity() const {
  return spec().bucket == kTensorBucket ? kUncut : std::max<uint64_t>(kBlock, spec().bucket);
}

uint32_t GridCodec::bucketOf(uint64_t count) const {
  if (spec().bucket != kTensorBucket) return spec().bucket;
  if (count > kLongest) {
    throw ValueError(name_ + ": expected a tensor of at most " + std::to_string(kLongest) + " elements, got " +
                     std::to_string(count));
  }
  return std::bit_ceil(std::max(static_cast<uint32_t>(count), 64u));
}

GridForm GridCodec::formOf(uint64_t count) const {
  GridForm form = form_;
  form.bucket = bucketOf(count);
  return form;
}

bool GridCodec::supports(DType dtype) const {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

size_t GridCodec::metaBytes(uint64_t count) const {
  const uint64_t bucket = bucketOf(count);
  return scale_bytes_ * scales_ * ((count + bucket - 1) / bucket);
}

size_t GridCodec::wordBytes(uint64_t count) const {
  return gridWordBytes(spec().bits, count);
}

size_t GridCodec::encodedBytes(uint64_t count, DType) const {
  return up64(metaBytes(count)) + wordBytes(count);
}

void GridCodec::checkRun(DType dtype, uint64_t first) const {
  if (!supports(dtype)) {
    throw TypeError(name_ + ": expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
  if (first % granularity() != 0) {
    throw ValueError(name_ + ": first element: expected a multiple of " + std::to_string(granularity()) + ", got " +
                     std::to_string(first));
  }
}

void GridCodec::encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                       const Draws& draws) const {
  checkRun(dtype, first);
  expectBytes<ValueError>(name_, encodedBytes(count, dtype), dst.size());
  if (count == 0) return;
  const size_t meta = metaBytes(count), words = up64(meta);
  std::memset(dst.data() + meta, 0, words - meta);
  const PhiloxKey key{draws.seed, draws.stream, draws.step};
  if (encodeTaken(dst.data(), src, dtype, first, count, key)) return;
  if (spec().nonfinite == Nonfinite::error) {
    expectTaken(src, dtype, first, count, "");
  } else if (encodeRepaired(dst.data(), src, dtype, first, count, key)) {
    return;
  }
  if (spec().delta != 0) {
    const float span = static_cast<float>((1 << spec().bits) - 1) * spec().delta;
    throw ValueError(name_ + ": expected buckets whose largest and smallest element are at most " +
                     std::to_string(span) + " apart, (2^bits - 1) * delta, got one with more in elements " +
                     std::to_string(first) + "..." + std::to_string(first + count - 1));
  }
  throw ValueError(name_ + ": expected elements that stay as they are until the op is done, got some that changed");
}

bool GridCodec::encodeTaken(std::byte* dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                            const PhiloxKey& key) const {
  FloatEnv env;
  if (dtype != DType::float32) return encodePieces(dst, static_cast<const uint16_t*>(src), dtype, first, count, key);
  return encode_(dst, dst + up64(metaBytes(count)), static_cast<const float*>(src), count, formOf(count),
                 first / kBlock, key);
}

bool GridCodec::encodeRepaired(std::byte* dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                               const PhiloxKey& key) const {
  const size_t bytes = count * itemBytes(dtype);
  const auto copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
  std::memcpy(copy.get(), src, bytes);
  std::vector<uint64_t> poisoned;
  if (spec().nonfinite == Nonfinite::saturate) {
    repair(copy.get(), dtype, count);
  } else {
    poisoned = blank(copy.get(), dtype, count, bucketOf(count));
  }
  if (!encodeTaken(dst, copy.get(), dtype, first, count, key)) return false;
  for (uint64_t bucket : poisoned)
    poison(dst, count, bucket);
  return true;
}

void GridCodec::expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count, const std::string& of) const {
  if (spec().nonfinite == Nonfinite::error) expectFinite(spec(), src, dtype, first, count, of);
}

bool GridCodec::needsRepair(const void* src, DType dtype, uint64_t count) const {
  return spec().nonfinite == Nonfinite::saturate && firstNonFinite(src, dtype, count) >= 0;
}

void GridCodec::repair(void* x, DType dtype, uint64_t count) const {
  saturate(x, dtype, count, bucketOf(count));
}

// NaN for the base, or the step of a codec that sends no base; all else of the bucket 0.
void GridCodec::poison(std::byte* dst, uint64_t count, uint64_t bucket) const {
  const uint64_t from = bucket * bucketOf(count), elements = std::min<uint64_t>(bucketOf(count), count - from);
  clearCodes({dst + up64(metaBytes(count)), wordBytes(count)}, spec().bits, from, elements);
  std::byte* to = putScale(dst + bucket * scales_ * scale_bytes_, floatOf(kPoisonBits), form_.bf16);
  if (scales_ == 2) putScale(to, 0, form_.bf16);
}

bool GridCodec::isPoison(const std::byte* meta, uint64_t bucket) const {
  return spec().nonfinite == Nonfinite::poison &&
         floatBits(scaleAt(meta, bucket * scales_, form_.bf16)) == kPoisonBits &&
         (scales_ == 1 || floatBits(scaleAt(meta, bucket * 2 + 1, form_.bf16)) == 0);
}

bool GridCodec::encodePieces(std::byte* dst, const uint16_t* src, DType dtype, uint64_t first, uint64_t count,
                             const PhiloxKey& key) const {
  const auto convert = dtype == DType::float16 ? table_.float16_to_float : table_.bfloat16_to_float;
  const GridForm form = formOf(count);
  const uint64_t piece = pieceOf(form.bucket, count);
  std::byte* words = dst + up64(metaBytes(count));
  const auto scratch = std::make_unique_for_overwrite<float[]>(piece);
  for (uint64_t at = 0; at < count; at += piece) {
    const uint64_t n = std::min(piece, count - at);
    convert(scratch.get(), src + at, n);
    if (!encode_(dst + metaBytes(at), words + wordBytes(at), scratch.get(), n, form, (first + at) / kBlock, key)) {
      return false;
    }
  }
  return true;
}

void GridCodec::checkPayload(std::span<const std::byte> src, uint64_t count) const {
  expectBytes<WireError>(name_, encodedBytes(count, DType::float32), src.size());
  if (count == 0) return;
  const size_t meta = metaBytes(count), words = up64(meta);
  for (size_t i = 0; i < meta / scale_bytes_; ++i) {
    const float scale = scaleAt(src.data(), i, form_.bf16);
    if ((floatBits(scale) & 0x7f800000u) == 0x7f800000u && !isPoison(src.data(), i / scales_)) {
      throw WireError(name_ + ": " + ((i + 1) % scales_ == 0 ? "step" : "base") + " of bucket " +
                      std::to_string(i / scales_) + ": expected a finite number, got " + std::to_string(scale));
    }
  }
  expectZero(src.subspan(meta, words - meta), name_, "metadata padding");

  if (spec().id == CodecId::tern) expectThreeCodes(src.subspan(words), name_);
  expectUnusedZero(src.subspan(words), spec().bits, count, name_);
}

void GridCodec::decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  FloatEnv env;
  if (dtype == DType::float32) {
    decode_[0](static_cast<float*>(dst), src.data(), src.data() + up64(metaBytes(count)), count, formOf(count));
  } else {
    decodePieces(static_cast<uint16_t*>(dst), dtype, src.data(), count);
  }
}

void GridCodec::decodePieces(uint16_t* dst, DType dtype, const std::byte* src, uint64_t count) const {
  const auto convert = dtype == DType::float16 ? table_.float_to_float16 : table_.float_to_bfloat16;
  const GridForm form = formOf(count);
  const uint64_t piece = pieceOf(form.bucket, count);
  const std::byte* words = src + up64(metaBytes(count));
  const auto scratch = std::make_unique_for_overwrite<float[]>(piece);
  for (uint64_t at = 0; at < count; at += piece) {
    const uint64_t n = std::min(piece, count - at);
    decode_[0](scratch.get(), src + metaBytes(at), words + wordBytes(at), n, form);
    convert(dst + at, scratch.get(), n);
  }
}

void GridCodec::decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                          uint64_t count) const {
  checkRun(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  FloatEnv env;
  decode_[1](acc, src.data(), src.data() + up64(metaBytes(count)), count, formOf(count));
}

}  // namespace lowcomm

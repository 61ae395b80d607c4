#include "codec/channel.h"

#include <cstring>
#include <memory>

#include "base/float_env.h"
#include "base/half.h"
#include "codec/element.h"
#include "codec/grid_payload.h"
#include "codec/nonfinite.h"
#include "codec/payload.h"
#include "codec/repair.h"
#include "kernels/channel/channel.h"
#include "kernels/finite.h"
#include "kernels/grid/grid_scale.h"

namespace lowcomm {

ChannelCodec::ChannelCodec(const CodecSpec& spec, const KernelTable& table)
    : Codec(spec), table_(table), name_(spec.str()), form_(gridForm(spec)), scales_(spec) {
  if (spec.axis != Axis::channel || spec.open()) {
    throw ValueError(name_ + ": channels: expected " + kGridChannels + ", got none");
  }
  const GridFamily& family = *gridFamily(spec.id);
  rule_ = gridRule(family);
  centred_ = family.centred;
  meta_ = scales_.bytes(channels());
}

bool ChannelCodec::supports(DType dtype) const {
  return isCoded(dtype);
}

size_t ChannelCodec::encodedBytes(uint64_t count, DType) const {
  if (count % channels() != 0) {
    throw ValueError(name_ + ": elements: expected a multiple of " + std::to_string(channels()) + ", got " +
                     std::to_string(count));
  }
  return count == 0 ? 0 : up64(meta_) + gridWordBytes(spec().bits, count);
}

void ChannelCodec::checkTensor(DType dtype, uint64_t first) const {
  if (!supports(dtype)) {
    throw TypeError(name_ + ": expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
  if (first != 0) throw ValueError(name_ + ": first element: expected 0, a whole tensor, got " + std::to_string(first));
}

void ChannelCodec::encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                          const Draws& draws) const {
  checkTensor(dtype, first);
  expectBytes<ValueError>(name_, encodedBytes(count, dtype), dst.size());
  if (count == 0) return;
  std::memset(dst.data() + meta_, 0, up64(meta_) - meta_);
  const PhiloxKey key{draws.seed, draws.stream, draws.step};
  if (encodeTaken(dst, src, dtype, count, key)) return;
  expectTaken(src, dtype, first, count, "");
  if (spec().nonfinite != Nonfinite::error) {
    const size_t bytes = count * itemBytes(dtype);
    const auto copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::memcpy(copy.get(), src, bytes);
    std::vector<uint64_t> poisoned;
    if (spec().nonfinite == Nonfinite::saturate) {
      repair(copy.get(), dtype, count);
    } else {
      poisoned = blankChannels(copy.get(), dtype, count, spec().bucket);
    }
    if (encodeTaken(dst, copy.get(), dtype, count, key)) {
      for (uint64_t channel : poisoned)
        poison(dst, count, channel);
      return;
    }
  }
  if (spec().delta != 0) {
    const float span = static_cast<float>((1 << spec().bits) - 1) * spec().delta;
    throw ValueError(name_ + ": expected channels whose largest and smallest element are at most " +
                     std::to_string(span) + " apart, (2^bits - 1) * delta, got one with more");
  }
  throw ValueError(name_ + ": expected elements that stay as they are until the op is done, got some that changed");
}

bool ChannelCodec::encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t count,
                               const PhiloxKey& key) const {
  FloatEnv env;
  const float* x = static_cast<const float*>(src);
  std::unique_ptr<float[]> converted;
  if (dtype != DType::float32) {
    converted = std::make_unique_for_overwrite<float[]>(count);
    const auto convert = dtype == DType::float16 ? table_.float16_to_float : table_.bfloat16_to_float;
    convert(converted.get(), static_cast<const uint16_t*>(src), count);
    x = converted.get();
  }
  return encodeChannels(table_, dst.data(), dst.data() + up64(meta_), x, count, channels(), form_, rule_, spec().bits,
                        key);
}

void ChannelCodec::expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count,
                               const std::string& of) const {
  if (spec().nonfinite == Nonfinite::error) expectFinite(spec(), src, dtype, first, count, of);
}

bool ChannelCodec::needsRepair(const void* src, DType dtype, uint64_t count) const {
  return spec().nonfinite == Nonfinite::saturate && firstNonFinite(src, dtype, count) >= 0;
}

void ChannelCodec::repair(void* x, DType dtype, uint64_t count) const {
  saturateChannels(x, dtype, count, spec().bucket);
}

void ChannelCodec::poison(std::span<std::byte> dst, uint64_t count, uint64_t channel) const {
  for (uint64_t e = channel; e < count; e += channels())
    clearCodes(dst.subspan(up64(meta_)), spec().bits, e, 1);
  scales_.poison(dst.data(), channel);
}

void ChannelCodec::checkPayload(std::span<const std::byte> src, uint64_t count) const {
  expectBytes<WireError>(name_, encodedBytes(count, DType::float32), src.size());
  if (count == 0) return;
  scales_.expectFinite(src.data(), channels(), name_, "channel");
  expectZero(src.subspan(meta_, up64(meta_) - meta_), name_, "metadata padding");
  const auto words = src.subspan(up64(meta_));
  if (spec().id == CodecId::tern) expectThreeCodes(words, name_);
  expectUnusedZero(words, spec().bits, count, name_);
}

void ChannelCodec::decodeTo(float* y, std::span<const std::byte> src, uint64_t count, bool add) const {
  decodeChannels(table_, y, src.data(), src.data() + up64(meta_), count, channels(), form_, centred_, add, spec().bits);
}

void ChannelCodec::decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first,
                          uint64_t count) const {
  checkTensor(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  FloatEnv env;
  if (dtype == DType::float32) return decodeTo(static_cast<float*>(dst), src, count, false);
  const auto wide = std::make_unique_for_overwrite<float[]>(count);
  decodeTo(wide.get(), src, count, false);
  const auto convert = dtype == DType::float16 ? table_.float_to_float16 : table_.float_to_bfloat16;
  convert(static_cast<uint16_t*>(dst), wide.get(), count);
}

void ChannelCodec::decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                             uint64_t count) const {
  checkTensor(dtype, first);
  checkPayload(src, count);
  if (count == 0) return;
  FloatEnv env;
  decodeTo(acc, src, count, true);
}

}  // namespace lowcomm

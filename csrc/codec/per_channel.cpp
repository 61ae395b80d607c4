// A grid codec with axis=channel (FORMAT.md, "Channels"): the elements with the same index in the last dimension share
// a scale, as activations want it, whose channels differ in size (AQ-SGD). Arithmetic and codes are GridCodec's; only
// the buckets lie otherwise. A tensor is not cut: every scale depends on all of it.
#include "kernels/per_channel/per_channel.h"

#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/float_env.h"
#include "codec/float_codec.h"
#include "codec/grid.h"
#include "codec/nonfinite.h"

namespace lowcomm {
namespace {

class ChannelCodec final : public FloatCodec {
 public:
  ChannelCodec(const CodecSpec& spec, const KernelTable& table)
      : FloatCodec(spec, table), form_(gridForm(spec)), scales_(spec) {
    if (spec.axis != Axis::channel || spec.open()) {
      throw ValueError(name() + ": channels: expected " + kGridChannels + ", got none");
    }
    const GridFamily& family = *gridFamily(spec.id);
    rule_ = gridRule(family);
    centred_ = family.centred;
    meta_ = scales_.bytes(channels());
  }

  uint64_t granularity() const override { return kUncut; }

  size_t encodedBytes(uint64_t count, DType) const override {
    if (count % channels() != 0) {
      throw ValueError(name() + ": elements: expected a multiple of " + std::to_string(channels()) + ", got " +
                       std::to_string(count));
    }
    return count == 0 ? 0 : up64(meta_) + gridWordBytes(spec().bits, count);
  }

 private:
  uint64_t channels() const { return spec().bucket; }

  bool encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t, uint64_t count,
                   const PhiloxKey& key) const override {
    std::memset(dst.data() + meta_, 0, up64(meta_) - meta_);
    FloatEnv env;
    std::unique_ptr<float[]> converted;
    const float* x = floats(src, dtype, count, converted);
    return encodeChannels(dst.data(), dst.data() + up64(meta_), x, count, channels(), form_, rule_, spec().bits, key);
  }

  std::vector<uint64_t> blankRefused(void* x, DType dtype, uint64_t count) const override {
    return blankChannels(x, dtype, count, spec().bucket);
  }
  void poison(std::span<std::byte> dst, uint64_t count, uint64_t channel) const override {
    for (uint64_t e = channel; e < count; e += channels())
      clearCodes(dst.subspan(up64(meta_)), spec().bits, e, 1);
    scales_.poison(dst.data(), channel);
  }

  void checkPayload(std::span<const std::byte> src, uint64_t count) const override {
    expectBytes<WireError>(name(), encodedBytes(count, DType::float32), src.size());
    if (count == 0) return;
    scales_.expectFinite(src.data(), channels(), name(), "channel");
    expectZero(src.subspan(meta_, up64(meta_) - meta_), name(), "metadata padding");
    const auto words = src.subspan(up64(meta_));
    expectUnusedZero(words, spec().bits, count, name());
  }

  void decodeTo(void* dst, DType dtype, std::span<const std::byte> src, uint64_t count) const override {
    if (dtype == DType::float32) return decodeFloats(static_cast<float*>(dst), src, count, false);
    const auto wide = std::make_unique_for_overwrite<float[]>(count);
    decodeFloats(wide.get(), src, count, false);
    narrowing(dtype)(static_cast<uint16_t*>(dst), wide.get(), count);
  }
  void addTo(float* acc, std::span<const std::byte> src, uint64_t count) const override {
    decodeFloats(acc, src, count, true);
  }
  void decodeFloats(float* y, std::span<const std::byte> src, uint64_t count, bool add) const {
    decodeChannels(y, src.data(), src.data() + up64(meta_), count, channels(), form_, centred_, add, spec().bits);
  }

  GridForm form_;
  GridRule rule_;
  bool centred_;
  GridScales scales_;
  size_t meta_;  // bytes of all channels' metadata, without padding
};

}  // namespace

std::shared_ptr<const Codec> makeChannelCodec(const CodecSpec& spec, const KernelTable& table) {
  return std::make_shared<ChannelCodec>(spec, table);
}

}  // namespace lowcomm

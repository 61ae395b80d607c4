#include "codec/channel_change.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/channel/channel.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

constexpr uint64_t kBlock = 512;
constexpr uint64_t kCached = 1024;

// Elements of a step, whole periods and blocks, 4 KiB or one of them; 0: that is more than a piece.
uint64_t stepOf(uint64_t channels) {
  const uint64_t least = std::lcm<uint64_t>(periodOf(channels), kBlock);
  return least > kChangePiece ? 0 : std::max(least, kCached / least * least);
}

class ChannelChange final : public ChangeEncoder, public ChangeDecoder {
 public:
  ChannelChange(const ChannelPayload& payload, const std::byte* src, std::byte* dst)
      : payload_(payload),
        kernels_(*payload.table.channels),
        src_(src),
        dst_(dst),
        step_(stepOf(payload.channels)),
        largest_(periodOf(payload.channels), 0),
        memory_(step_),
        change_(step_) {}

  bool measures() const override { return true; }
  uint64_t piece() const override { return step_; }

  bool measure(const float* x, Elements before, uint64_t count) override {
    each(count, [&](uint64_t at, uint64_t n) {
      const float* m = widened(payload_.table, further(before, at), n, memory_.data());
      payload_.table.difference(change_.data(), x + at, m, n);
      fetchNext(x, before, at + n, count);
      kernels_.largest(largest_.data(), change_.data(), n, largest_.size());
    });
    return true;
  }

  bool encode(const float* x, Elements before, State after, uint64_t count) override {
    if (inverse_.empty()) {
      if (!scalesOfLargest(dst_, inverse_, largest_, payload_.channels, payload_.form)) return false;
      decodingScales(base_, scale_, dst_, payload_.channels, payload_.form, true);
    }
    const ChannelScales scales{nullptr, inverse_.data(), nullptr, inverse_.size()};
    each(count, [&](uint64_t at, uint64_t n) {
      const float* m = widened(payload_.table, further(before, at), n, memory_.data());
      payload_.table.difference(change_.data(), x + at, m, n);
      fetchNext(x, before, at + n, count);
      kernels_.encode(dst_ + payload_.head + words_at_, change_.data(), n, scales, payload_.form, GridRule::centred,
                      payload_.bits, {});
      add(m, dst_, further(after, at), n, nullptr);
    });
    return true;
  }

  void decode(float* y, Elements before, State after, uint64_t count) override {
    if (scale_.empty()) decodingScales(base_, scale_, src_, payload_.channels, payload_.form, true);
    each(count, [&](uint64_t at, uint64_t n) {
      const float* m = widened(payload_.table, further(before, at), n, memory_.data());
      add(m, src_, further(after, at), n, y + at);
    });
  }

 private:
  template <typename F>
  void each(uint64_t count, F&& step) {
    for (uint64_t at = 0; at < count; at += step_)
      step(at, std::min(step_, count - at));
  }

  void fetchNext(const float* x, Elements before, uint64_t at, uint64_t count) const {
    const uint64_t n = std::min(step_, count - at);
    fetch({x + at, DType::float32}, n);
    fetch(further(before, at), n);
  }

  // after = m, which may be in memory_, and what the payload has of the next n elements; the sum itself to y, too.
  void add(const float* m, const std::byte* payload, State after, uint64_t n, float* y) {
    const bool wide = after.dtype == DType::float32;
    float* sum = wide ? static_cast<float*>(after.data) : memory_.data();
    if (sum != m) std::copy_n(m, n, sum);
    kernels_.decode(sum, payload + payload_.head + words_at_, n, base_.data(), scale_.data(), scale_.size(), true, true,
                    payload_.bits);
    words_at_ += n / 8 * static_cast<uint64_t>(payload_.bits);
    if (y) std::copy_n(sum, n, y);
    if (!wide) keep(payload_.table, after, sum, n);
  }

  const ChannelPayload payload_;
  const ChannelKernels& kernels_;
  const std::byte* const src_;
  std::byte* const dst_;
  const uint64_t step_;
  std::vector<uint32_t> largest_;
  std::vector<float> inverse_, base_, scale_;
  std::vector<float> memory_, change_;
  uint64_t words_at_ = 0;  // bytes of codes that are done
};

bool fits(const ChannelPayload& payload) {
  return !payload.form.rms && stepOf(payload.channels) > 0;
}

}  // namespace

std::unique_ptr<ChangeEncoder> makeChannelChangeEncoder(const ChannelPayload& payload, std::byte* dst) {
  return fits(payload) ? std::make_unique<ChannelChange>(payload, dst, dst) : nullptr;
}

std::unique_ptr<ChangeDecoder> makeChannelChangeDecoder(const ChannelPayload& payload, const std::byte* src) {
  return fits(payload) ? std::make_unique<ChannelChange>(payload, src, nullptr) : nullptr;
}

}  // namespace lowcomm

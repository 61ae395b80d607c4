// Deltas of grid codecs in one pass (codec/change.h). Buckets of up to kMostChangeBucket elements have loops for it
// (kernels/change/change.h); what they leave, the last elements of a run, other buckets, codebooks and rotations, is
// subtracted, encoded, decoded and added by the loops that each of these has, a piece in the first-level cache.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "codec/change.h"
#include "codec/grid.h"
#include "codec/nonfinite.h"
#include "kernels/change/change.h"

namespace lowcomm {
namespace {

constexpr uint64_t kBlock = 512;
constexpr uint64_t kCached = 1024;  // elements of a step of loops one after the other

}  // namespace

class GridChange final : public ChangeEncoder, public ChangeDecoder {
 public:
  GridChange(const GridCodec& codec, const std::byte* payload, std::byte* dst, uint64_t first, uint64_t count,
             const Draws& draws)
      : codec_(codec),
        table_(codec.table()),
        form_(codec.formOf(count)),
        bits_(codec.spec().bits),
        head_(up64(codec.metaBytes(count))),
        payload_(payload),
        dst_(dst),
        first_(first),
        key_{draws.seed, draws.stream, draws.step} {
    const GridFamily& family = *gridFamily(codec.spec().id);
    centred_ = family.centred;
    if (!family.book && !isRotated(codec.spec()) && form_.bucket <= kMostChangeBucket) {
      group_ = codec.granularity();
      rule_ = static_cast<size_t>(gridRule(family));
    }
  }

  bool encode(const float* x, Elements before, State after, uint64_t count) override {
    const uint64_t fused = fusedOf(count);
    if (fused > 0) {
      const auto loop = table_.changes->encode[memoryType(after.dtype)][rule_];
      const size_t done =
          loop(dst_ + metaAt(), dst_ + wordsAt(), x, before.data, after.data, fused, form_, bits_, block(), key_);
      if (done < fused) return false;
      at_ += fused;
    }
    for (uint64_t i = fused; i < count;) {
      const uint64_t n = std::min(step(), count - i);
      const float* m = widened(table_, further(before, i), n, room(memory_));
      const Elements next = further(before, i + n);
      if (!encodeStep(x + i, m, n, x + i + n, {next, std::min(step(), count - i - n)})) return false;
      add(m, further(after, i), n);
      i += n;
      at_ += n;
    }
    return true;
  }

  void decode(float* y, Elements before, State after, uint64_t count) override {
    const uint64_t fused = fusedOf(count);
    if (fused > 0) {
      const auto loop = table_.changes->decode[memoryType(after.dtype)][centred_];
      loop(y, before.data, after.data, payload_ + metaAt(), payload_ + wordsAt(), fused, form_, bits_);
      at_ += fused;
    }
    for (uint64_t i = fused; i < count;) {
      const uint64_t n = std::min(step(), count - i);
      const float* m = widened(table_, further(before, i), n, room(memory_));
      fetch(further(before, i + n), std::min(step(), count - i - n));
      add(m, further(after, i), n, y + i);
      i += n;
      at_ += n;
    }
  }

 private:
  size_t metaAt() const { return codec_.metaBytes(at_); }
  size_t wordsAt() const { return head_ + codec_.wordBytes(at_); }
  uint64_t block() const { return (first_ + at_) / kBlock; }
  uint64_t step() const { return std::max<uint64_t>(kCached, form_.bucket); }

  uint64_t fusedOf(uint64_t count) const { return group_ == 0 ? 0 : count / group_ * group_; }

  static size_t memoryType(DType dtype) {
    const MemoryType type = dtype == DType::float16    ? MemoryType::float16
                            : dtype == DType::bfloat16 ? MemoryType::bfloat16
                                                       : MemoryType::float32;
    return static_cast<size_t>(type);
  }

  struct Soon {
    Elements memory;
    uint64_t count;
  };
  bool encodeStep(const float* x, const float* m, uint64_t n, const void* soon, const Soon& next) {
    float* change = room(change_);
    table_.difference(change, x, m, n);
    fetch(next.memory, next.count);
    form_.soon = soon;
    std::byte *meta = dst_ + metaAt(), *words = dst_ + wordsAt();
    if (!isRotated(codec_.spec())) return codec_.encode_(meta, words, change, n, form_, block(), key_);
    float* rotated = room(rotated_);
    return table_.rotation->rotate(rotated, change, n) &&
           codec_.encodeRotated(meta, words, rotated, n, form_, block(), key_);
  }

  // after = m, which may be in memory_, and what the payload has of the next n elements; the sum itself to y, too.
  void add(const float* m, State after, uint64_t n, float* y = nullptr) {
    const bool wide = after.dtype == DType::float32;
    float* sum = wide ? static_cast<float*>(after.data) : room(memory_);
    if (sum != m) std::copy_n(m, n, sum);
    const std::byte *meta = payload_ + metaAt(), *words = payload_ + wordsAt();
    if (isRotated(codec_.spec())) {
      float* rotated = room(rotated_);
      codec_.decode_[0](rotated, meta, words, codec_.codes(n), form_);
      table_.rotation->unrotate[1](sum, rotated, n);
    } else {
      codec_.decode_[1](sum, meta, words, n, form_);
    }
    if (y) std::copy_n(sum, n, y);
    if (!wide) keep(table_, after, sum, n);
  }

  float* room(std::unique_ptr<float[]>& memory) const {
    if (!memory) memory = std::make_unique_for_overwrite<float[]>(codec_.codes(step()));
    return memory.get();
  }

  const GridCodec& codec_;
  const KernelTable& table_;
  GridForm form_;
  const int bits_;
  const size_t head_;
  const std::byte* const payload_;
  std::byte* const dst_;
  const uint64_t first_;
  const PhiloxKey key_;
  uint64_t group_ = 0;  // elements that the fused loops take a multiple of; 0: they take none
  size_t rule_ = 0;
  bool centred_ = false;
  uint64_t at_ = 0;  // elements that are done
  std::unique_ptr<float[]> memory_, change_, rotated_;
};

std::unique_ptr<ChangeEncoder> GridCodec::changeEncoder(std::span<std::byte> dst, uint64_t first, uint64_t count,
                                                        const Draws& draws) const {
  if (spec().bucket == kTensorBucket || spec().bucket > kChangePiece) return nullptr;
  begin(dst, DType::float32, first, count);
  const size_t meta = metaBytes(count);
  std::memset(dst.data() + meta, 0, up64(meta) - meta);
  return std::make_unique<GridChange>(*this, dst.data(), dst.data(), first, count, draws);
}

std::unique_ptr<ChangeDecoder> GridCodec::changeDecoder(std::span<const std::byte> src, uint64_t first,
                                                        uint64_t count) const {
  if (spec().bucket == kTensorBucket || spec().bucket > kChangePiece) return nullptr;
  checkRun(DType::float32, first);
  checkPayload(src, count);
  return std::make_unique<GridChange>(*this, src.data(), nullptr, first, count, Draws{});
}

}  // namespace lowcomm

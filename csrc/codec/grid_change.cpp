#include "codec/grid_change.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "codec/change.h"
#include "codec/nonfinite.h"

namespace lowcomm {
namespace {

constexpr uint64_t kCached = 1024;  // elements of a step of loops one after the other

}  // namespace

GridDelta::GridDelta(const GridCodec& codec, std::byte* payload, uint64_t first, uint64_t count, const Draws& draws)
    : codec_(codec),
      form_(codec.formOf(count)),
      payload_(payload),
      head_(up64(codec.metaBytes(count))),
      first_(first),
      key_{draws.seed, draws.stream, draws.step} {
  if (codec.spec().id != CodecId::gauss || form_.bucket != kCodeBlock) return;
  change_ = codec.table().codebooks->change[codec.spec().bits - 1];
  advance_ = codec.table().codebooks->advance[codec.spec().bits - 1];
}

uint64_t GridDelta::step() const {
  return std::max<uint64_t>(change_ ? kCodeBlock : kCached, form_.bucket);
}

float* GridDelta::room(std::unique_ptr<float[]>& memory) const {
  if (!memory) memory = std::make_unique_for_overwrite<float[]>(std::max(step(), kCodeBlock));
  return memory.get();
}

bool GridDelta::encode(const float* x, const float* m, float* after, uint64_t n) {
  for (uint64_t i = 0; i < n;) {
    if (change_) {
      const uint64_t done = change_(payload_ + metaAt(), payload_ + wordsAt(), after + i, x + i, m + i,
                                    (n - i) / kCodeBlock * kCodeBlock, form_, codec_.blocks(at_));
      i += done;
      at_ += done;
      if (i == n) return true;
    }
    const uint64_t size = std::min(step(), n - i);
    if (!encodeStep(x + i, m + i, after + i, size)) return false;
    i += size;
  }
  return true;
}

bool GridDelta::encodeStep(const float* x, const float* m, float* after, uint64_t n) {
  float* change = room(change_of_);
  codec_.table().difference(change, x, m, n);
  fetch({m + n, DType::float32}, n);
  form_.soon = x + n;
  std::byte *meta = payload_ + metaAt(), *words = payload_ + wordsAt();
  const uint64_t block = (first_ + at_) / kCodeBlock;
  if (!isRotated(codec_.spec())) {
    if (!codec_.encode_(meta, words, change, n, form_, block, key_)) return false;
  } else {
    float* rotated = room(rotated_);
    if (!codec_.rotate()(rotated, change, n, codec_.blocks(at_)) ||
        !codec_.encodeRotated(meta, words, rotated, n, form_, block, key_))
      return false;
  }
  addStep(after, m, n);
  return true;
}

void GridDelta::decode(float* y, float* after, const float* m, uint64_t n) {
  const uint64_t fused = advance_ ? n / kCodeBlock * kCodeBlock : 0;
  if (fused > 0) advance_(y, after, m, payload_ + metaAt(), payload_ + wordsAt(), fused, form_, codec_.blocks(at_));
  at_ += fused;
  for (uint64_t i = fused; i < n;) {
    const uint64_t size = std::min(step(), n - i);
    fetch({m + i + size, DType::float32}, std::min(step(), n - i - size));
    addStep(after + i, m + i, size);
    if (y != after) std::copy_n(after + i, size, y + i);
    i += size;
  }
}

// after = m + what the payload has of the next n elements.
void GridDelta::addStep(float* after, const float* m, uint64_t n) {
  const std::byte *meta = payload_ + metaAt(), *words = payload_ + wordsAt();
  if (after != m) std::copy_n(m, n, after);
  if (isRotated(codec_.spec())) {
    float* rotated = room(rotated_);
    codec_.decode_[0](rotated, meta, words, codec_.codes(n), form_);
    codec_.unrotate(true)(after, rotated, n, codec_.blocks(at_));
  } else {
    codec_.decode_[1](after, meta, words, n, form_);
  }
  at_ += n;
}

// A run's GridDelta for memories of every type.
class GridChange final : public Change {
 public:
  GridChange(const GridCodec& codec, GridDelta delta) : table_(codec.table()), delta_(std::move(delta)) {
    step_ = std::max<uint64_t>(kCached, codec.granularity());
  }

  bool encode(const float* x, Elements before, State after, uint64_t count) override {
    return each(before, after, count,
                [&](uint64_t at, const float* m, float* to, uint64_t n) { return delta_.encode(x + at, m, to, n); });
  }

  void decode(float* y, Elements before, State after, uint64_t count) override {
    each(before, after, count, [&](uint64_t at, const float* m, float* to, uint64_t n) {
      delta_.decode(y + at, to, m, n);
      return true;
    });
  }

 private:
  template <typename F>
  bool each(Elements before, State after, uint64_t count, F&& step) {
    if (after.dtype == DType::float32)
      return step(0, static_cast<const float*>(before.data), static_cast<float*>(after.data), count);
    if (!memory_) memory_ = std::make_unique_for_overwrite<float[]>(step_);
    for (uint64_t at = 0; at < count; at += step_) {
      const uint64_t n = std::min(step_, count - at);
      widened(table_, further(before, at), n, memory_.get());
      if (!step(at, memory_.get(), memory_.get(), n)) return false;
      keep(table_, further(after, at), memory_.get(), n);
    }
    return true;
  }

  const KernelTable& table_;
  GridDelta delta_;
  uint64_t step_;
  std::unique_ptr<float[]> memory_;
};

std::unique_ptr<Change> GridCodec::changeEncoder(std::span<std::byte> dst, uint64_t first, uint64_t count,
                                                 const Draws& draws) const {
  if (spec().bucket == kTensorBucket || spec().bucket > kChangePiece) return nullptr;
  begin(dst, DType::float32, first, count);
  const size_t meta = metaBytes(count);
  std::memset(dst.data() + meta, 0, up64(meta) - meta);
  return std::make_unique<GridChange>(*this, GridDelta(*this, dst.data(), first, count, draws));
}

std::unique_ptr<Change> GridCodec::changeDecoder(std::span<const std::byte> src, uint64_t first, uint64_t count) const {
  if (spec().bucket == kTensorBucket || spec().bucket > kChangePiece) return nullptr;
  checkRun(DType::float32, first);
  checkPayload(src, count);
  return std::make_unique<GridChange>(*this, GridDelta(*this, const_cast<std::byte*>(src.data()), 0, count, {}));
}

}  // namespace lowcomm

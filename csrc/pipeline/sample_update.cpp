#include "pipeline/sample_update.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/float_env.h"
#include "kernels/cast/cast.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

Layout layoutOf(const std::vector<uint32_t>& versions, uint64_t elements, const DeltaCodecs& codecs) {
  const auto codecOf = [&](uint32_t version) -> const CodecSpec& {
    if (version == kNotKept) return codecs.overflow ? *codecs.overflow : codecs.first;
    return version > 0 ? codecs.seen : codecs.first;
  };
  std::vector<Segment> segments;
  const CodecSpec* last = nullptr;
  for (size_t i = 0; i < versions.size(); ++i) {
    const CodecSpec& codec = codecOf(versions[i]);
    if (&codec == last) {
      segments.back().count += elements;
    } else {
      segments.push_back({i * elements, elements, codec});
    }
    last = &codec;
  }
  return Layout(std::move(segments));
}

}  // namespace

SampleUpdate::SampleUpdate(std::shared_ptr<SampleMemory> memory, std::vector<uint64_t> samples,
                           const DeltaCodecs& codecs)
    : memory_(std::move(memory)), samples_(std::move(samples)), layout_({}) {
  try {
    for (uint64_t sample : samples_) {
      versions_.push_back(memory_->admit(sample));
    }
    layout_ = layoutOf(versions_, elements(), codecs);
  } catch (...) {
    release();
    throw;
  }
}

SampleUpdate::~SampleUpdate() {
  release();
}

void SampleUpdate::release() {
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (versions_[i] == 0) memory_->release(samples_[i]);
  }
  versions_.clear();
}

std::vector<SampleKey> SampleUpdate::keys() const {
  std::vector<SampleKey> keys;
  for (size_t i = 0; i < samples_.size(); ++i)
    keys.push_back({samples_[i], versions_[i]});
  return keys;
}

void SampleUpdate::load() {
  slots_.resize(samples_.size() * memory_->format().slotBytes());
  for (size_t i = 0; i < samples_.size(); ++i) {
    if (hasSlot(i)) memory_->read(samples_[i], versions_[i], slot(i));
  }
}

State SampleUpdate::state(uint64_t at, uint64_t count) {
  const SlotFormat& format = memory_->format();
  if (!format.coded()) return {slots_.data() + at * itemBytes(format.dtype()), format.dtype()};
  decoded_.resize(samples_.size() * elements());
  // A sample's codes are decoded shortly before its elements are used.
  for (; decoded_samples_ * elements() < at + count; ++decoded_samples_) {
    if (!hasSlot(decoded_samples_)) continue;
    format.decode(slot(decoded_samples_), decoded_.data() + decoded_samples_ * elements());
  }
  return {decoded_.data() + at, DType::float32};
}

void SampleUpdate::finish(uint64_t at, uint64_t count) {
  const SlotFormat& format = memory_->format();
  if (!format.coded()) return;
  const uint64_t size = elements();
  for (uint64_t i = at / size; (i + 1) * size <= at + count; ++i) {
    if (versions_[i] == kNotKept) continue;
    format.encode(decoded_.data() + i * size, slot(i), samples_[i], versions_[i] + 1);
  }
  if (at + count == decoded_.size()) std::vector<float>().swap(decoded_);
}

void SampleUpdate::commit() {
  for (size_t i = 0; i < samples_.size(); ++i) {
    if (versions_[i] != kNotKept) memory_->update(samples_[i], versions_[i], slot(i));
    memory_->count(versions_[i]);
  }
  release();
}

void remember(State after, float* decoded, uint64_t count) {
  FloatEnv env;
  const bool wide = after.dtype == DType::float32, half = after.dtype == DType::float16;
  const float largest = half ? kFloat16Largest : kBfloat16Largest;
  for (uint64_t i = 0; i < count; ++i) {
    if (!std::isfinite(decoded[i])) decoded[i] = 0;
    if (!wide) decoded[i] = heldState(decoded[i], largest);
  }
  if (wide) {
    std::copy_n(decoded, count, static_cast<float*>(after.data));
  } else {
    (half ? kernels().float_to_float16 : kernels().float_to_bfloat16)(static_cast<uint16_t*>(after.data), decoded,
                                                                      count);
  }
}

void toFloats(Elements from, float* to, uint64_t count) {
  if (from.dtype == DType::float32) {
    std::copy_n(static_cast<const float*>(from.data), count, to);
  } else {
    const bool half = from.dtype == DType::float16;
    (half ? kernels().float16_to_float : kernels().bfloat16_to_float)(to, static_cast<const uint16_t*>(from.data),
                                                                      count);
  }
}

}  // namespace lowcomm

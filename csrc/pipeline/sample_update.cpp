#include "pipeline/sample_update.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/float_env.h"
#include "kernels/cast/cast_rules.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

Layout layoutOf(const std::vector<uint32_t>& versions, uint64_t elements, const DeltaCodecs& codecs) {
  std::vector<Segment> segments;
  for (size_t i = 0; i < versions.size(); ++i) {
    const bool seen = versions[i] > 0;
    if (i > 0 && seen == (versions[i - 1] > 0)) {
      segments.back().count += elements;
    } else {
      segments.push_back({i * elements, elements, seen ? codecs.seen : codecs.first});
    }
  }
  return Layout(std::move(segments));
}

std::vector<uint32_t> versionsOf(const SampleMemory& memory, const std::vector<uint64_t>& samples) {
  std::vector<uint32_t> versions;
  for (uint64_t sample : samples)
    versions.push_back(memory.version(sample));
  return versions;
}

}  // namespace

SampleUpdate::SampleUpdate(std::shared_ptr<SampleMemory> memory, std::vector<uint64_t> samples,
                           const DeltaCodecs& codecs)
    : memory_(std::move(memory)),
      samples_(std::move(samples)),
      versions_(versionsOf(*memory_, samples_)),
      layout_(layoutOf(versions_, elements(), codecs)) {}

std::vector<SampleKey> SampleUpdate::keys() const {
  std::vector<SampleKey> keys;
  for (size_t i = 0; i < samples_.size(); ++i)
    keys.push_back({samples_[i], versions_[i]});
  return keys;
}

void SampleUpdate::load() {
  slots_.resize(samples_.size() * memory_->format().slotBytes());
  for (size_t i = 0; i < samples_.size(); ++i) {
    if (versions_[i] > 0) memory_->read(samples_[i], versions_[i], slot(i));
  }
}

State SampleUpdate::state(uint64_t at, uint64_t count) {
  const SlotFormat& format = memory_->format();
  if (!format.coded()) return {slots_.data() + at * itemBytes(format.dtype()), format.dtype()};
  decoded_.resize(samples_.size() * elements());
  // A sample's codes are decoded shortly before its elements are used.
  for (; decoded_samples_ * elements() < at + count; ++decoded_samples_) {
    if (versions_[decoded_samples_] == 0) continue;
    format.decode(slot(decoded_samples_), decoded_.data() + decoded_samples_ * elements());
  }
  return {decoded_.data() + at, DType::float32};
}

void SampleUpdate::finish(uint64_t at, uint64_t count) {
  const SlotFormat& format = memory_->format();
  if (!format.coded()) return;
  const uint64_t size = elements();
  for (uint64_t i = at / size; (i + 1) * size <= at + count; ++i)
    format.encode(decoded_.data() + i * size, slot(i), samples_[i], versions_[i] + 1);
  if (at + count == decoded_.size()) std::vector<float>().swap(decoded_);
}

void SampleUpdate::commit() {
  for (size_t i = 0; i < samples_.size(); ++i)
    memory_->update(samples_[i], versions_[i], slot(i));
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

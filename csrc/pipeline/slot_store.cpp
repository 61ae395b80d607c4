#include "pipeline/slot_store.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "base/error.h"
#include "base/float_env.h"
#include "base/hashes.h"
#include "base/narrow_float.h"

namespace lowcomm {

uint32_t RamStore::version(uint64_t sample) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(sample);
  return slot == slots_.end() ? 0 : slot->second.version;
}

void RamStore::read(uint64_t sample, std::byte* to) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::memcpy(to, slots_.at(sample).data.get(), slot_bytes_);
}

void RamStore::write(uint64_t sample, uint32_t version, const std::byte* from) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = slots_[sample];
  if (!slot.data) slot.data.reset(new std::byte[slot_bytes_]);
  std::memcpy(slot.data.get(), from, slot_bytes_);
  slot.version = version;
}

void RamStore::forget(uint64_t sample) {
  std::lock_guard<std::mutex> lock(mutex_);
  slots_.erase(sample);
}

std::vector<SlotSummary> RamStore::table() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<SlotSummary> table;
  for (const auto& [sample, slot] : slots_)
    table.push_back({sample, slot.version, crc32c(slot.data.get(), slot_bytes_)});
  return table;
}

uint64_t RamStore::slots() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slots_.size();
}

namespace {

constexpr uint64_t kDrawsOfSlots = 0x736c6f7473ull;  // keeps their draws apart from those of messages

uint64_t expectElements(uint64_t elements) {
  if (elements == 0) throw ValueError("memory of samples: expected 1 element a sample or more, got 0");
  return elements;
}

const CodecSpec& expectSlotCodec(const CodecSpec& spec) {
  if (spec.id == CodecId::none || needsTable(spec)) {
    throw ValueError("memory of samples: expected fp32, fp16, bf16 or a codec without a level table, got " +
                     spec.str());
  }
  return spec;
}

std::optional<DType> floatType(const std::string& text) {
  if (text == "fp32") return DType::float32;
  if (text == "fp16") return DType::float16;
  if (text == "bf16") return DType::bfloat16;
  return std::nullopt;
}

}  // namespace

SlotFormat::SlotFormat(uint64_t elements, DType dtype)
    : elements_(expectElements(elements)), dtype_(dtype), slot_bytes_(elements * itemBytes(dtype)) {
  if (!isCoded(dtype)) {
    throw TypeError(std::string("memory of samples: expected float32, float16 or bfloat16, got ") + dtypeName(dtype));
  }
}

SlotFormat::SlotFormat(uint64_t elements, const CodecSpec& codec)
    : elements_(expectElements(elements)),
      dtype_(DType::float32),
      codec_(makeCodec(expectSlotCodec(codec))),
      slot_bytes_(codec_->encodedBytes(elements, DType::float32)) {}

SlotFormat SlotFormat::parse(const std::string& text, uint64_t elements, uint64_t channels, uint64_t unit) {
  if (const auto dtype = floatType(text)) return SlotFormat(elements, *dtype);
  const CodecSpec parsed = CodecSpec::parse(text), codec = parsed.open() ? parsed.withChannels(channels) : parsed;
  return SlotFormat(elements, unit == 0 ? codec : codec.withUnit(unit));
}

uint64_t SlotFormat::unitOf(const std::string& name) {
  const bool plain =
      name == dtypeName(DType::float32) || name == dtypeName(DType::float16) || name == dtypeName(DType::bfloat16);
  return plain ? 0 : CodecSpec::parse(name).unit;
}

void SlotFormat::check(const std::string& text) {
  if (!floatType(text)) expectSlotCodec(CodecSpec::parse(text));
}

std::string SlotFormat::name() const {
  return codec_ ? codec_->spec().str() : dtypeName(dtype_);
}

void SlotFormat::decode(const std::byte* slot, float* elements) const {
  try {
    codec_->decode(elements, DType::float32, {slot, slot_bytes_}, 0, elements_);
  } catch (const WireError& error) {  // no peer has sent this
    throw ValueError(std::string("memory of samples: ") + error.what());
  }
}

void SlotFormat::encode(float* elements, std::byte* slot, uint64_t sample, uint32_t version) const {
  FloatEnv env;
  const float limit = finiteLimit(codec_->spec());
  const float largest =
      std::isinf(limit) ? std::numeric_limits<float>::max() : std::nextafter(limit, 0.0f);  // the limit is refused
  for (uint64_t i = 0; i < elements_; ++i) {
    const float x = elements[i];
    if (std::abs(x) <= largest) continue;
    elements[i] = std::isfinite(x) ? std::copysign(largest, x) : 0;
  }
  const Draws draws{kDrawsOfSlots ^ sample * Draws::kSlotsFurther, 0, version};
  codec_->encode({slot, slot_bytes_}, elements, DType::float32, 0, elements_, draws);
}

}  // namespace lowcomm

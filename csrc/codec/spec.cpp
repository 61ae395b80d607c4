#include "codec/spec.h"

#include <charconv>
#include <limits>

#include "base/error.h"
#include "kernels/finite.h"

namespace lowcomm {
namespace {

// The fewest digits that parse to the same number: one number has one text.
template <typename Number>
std::string shortest(Number value) {
  char digits[32];
  const auto written = std::to_chars(digits, digits + sizeof(digits), value);
  return {digits, written.ptr};
}

std::string plainText(const CodecSpec& spec) {
  const PlainFamily* family = plainFamily(spec.id);
  if (family == nullptr) return "layout";
  std::string options;
  if (spec.id == CodecId::topk) {
    const GridFamily* values = gridFamily(spec.values);
    if (spec.bucket != 0) options += ",chunk=" + std::to_string(spec.bucket);
    options += ",keep=" + shortest(spec.keep) + ",values=" + (values ? std::string(values->name) : "none");
    if (values) options += std::to_string(spec.value_bits);
  }
  if (spec.nonfinite == Nonfinite::poison) options += ",nonfinite=poison";
  if (!options.empty()) options[0] = ':';
  return std::string(family->name) + options;
}

}  // namespace

std::string gridBits(const GridFamily& family) {
  const std::string least = std::to_string(family.least_bits);
  return family.least_bits == family.most_bits ? least : least + "..." + std::to_string(family.most_bits);
}

std::string CodecSpec::str() const {
  if (id == CodecId::none) return "none";
  const GridFamily* family = gridFamily(id);
  if (family == nullptr) return plainText(*this);
  std::string text(family->name);
  text += std::to_string(bits);
  if (axis == Axis::channel) {
    text += ":axis=channel" + (bucket == 0 ? "" : ",C=" + std::to_string(bucket));
  } else {
    text += ":bucket=" + (bucket == kTensorBucket ? "tensor" : std::to_string(bucket));
  }
  if (meta != family->default_meta) text += meta == Meta::bf16 ? ",meta=bf16" : ",meta=fp32";
  if (range == Range::l2) text += ",range=l2";
  if (rotate) text += ",rotate=1";
  if (gain != 1) text += ",gain=" + shortest(gain);
  if (unit != 0) text += ",unit=" + std::to_string(unit);
  if (nonfinite == Nonfinite::poison) text += ",nonfinite=poison";
  return text;
}

bool isRotated(const CodecSpec& spec) {
  return spec.rotate || spec.id == CodecId::gauss;
}

bool needsTable(const CodecSpec& spec) {
  return spec.id == CodecId::levels;
}

float finiteLimit(const CodecSpec& spec) {
  if (isCast(spec.id)) return std::numeric_limits<float>::infinity();
  return isRotated(spec) ? kRotatedLimit : kFiniteLimit;
}

uint8_t frameFlags(const CodecSpec& spec) {
  const GridFamily* family = gridFamily(spec.id);
  if (family == nullptr) return 0;
  return static_cast<uint8_t>(static_cast<uint8_t>(family->rounding) | (spec.range == Range::l2 ? kL2Flag : 0) |
                              (spec.meta == Meta::bf16 ? kBf16Flag : 0) |
                              (spec.axis == Axis::channel ? kChannelFlag : 0) | (isRotated(spec) ? kRotatedFlag : 0) |
                              (spec.unit != 0 ? kUnitFlag : 0));
}

CodecSpec CodecSpec::withChannels(uint64_t channels) const {
  if (axis != Axis::channel) return *this;
  if (bucket != 0 && bucket != channels) {
    throw ValueError("codec '" + str() + "': channels: expected " + std::to_string(bucket) + ", got " +
                     std::to_string(channels));
  }
  if (channels > UINT32_MAX || !isGridChannels(static_cast<uint32_t>(channels))) {
    throw ValueError("codec '" + str() + "': channels: expected " + kGridChannels + ", got " +
                     std::to_string(channels));
  }
  CodecSpec spec = *this;
  spec.bucket = static_cast<uint32_t>(channels);
  return spec;
}

const char* tiesAll(const CodecSpec& spec) {
  if (spec.id == CodecId::topk) return "topk";
  if (!isGrid(spec.id)) return nullptr;
  return spec.axis == Axis::channel ? "axis=channel" : spec.bucket == kTensorBucket ? "bucket=tensor" : nullptr;
}

CodecSpec CodecSpec::withUnit(uint64_t elements) const {
  if (const char* what = tiesAll(*this)) {
    throw ValueError("codec '" + str() +
                     "': unit: expected a codec whose scales are those of consecutive elements, got " + what +
                     ", with which every element depends on all others of a message");
  }
  if (!isUnit(elements)) {
    throw ValueError("codec '" + str() + "': unit: expected " + kUnits + ", got " + std::to_string(elements));
  }
  if (unit != 0 && unit != elements) {
    throw ValueError("codec '" + str() + "': unit: expected " + std::to_string(unit) + ", got " +
                     std::to_string(elements));
  }
  CodecSpec spec = *this;
  spec.unit = isGrid(id) && (elements % bucket != 0 || isRotated(*this)) ? elements : 0;
  return spec;
}

CodecSpec valueSpec(const CodecSpec& topk) {
  const GridFamily* family = gridFamily(topk.values);
  CodecSpec spec;
  spec.id = topk.values;
  spec.bits = topk.value_bits;
  if (family != nullptr) {
    spec.bucket = topk.bucket == 0 ? family->default_bucket : kChunkBucket;
    if (topk.bucket != 0 && family->bf16()) spec.meta = Meta::bf16;
  }
  spec.nonfinite = topk.nonfinite;
  return spec;
}

// ---- which options go together, and which hardly ever are what was meant ----

namespace {

std::optional<std::string> plainMisfit(const CodecSpec& spec, const PlainFamily& family) {
  const std::string name(family.name);
  if (spec.bits != 0) return "bits: expected 0 with " + name + ", got " + std::to_string(spec.bits);
  if (spec.bucket != 0 && (spec.id != CodecId::topk || !isGridBucket(spec.bucket))) {
    return "bucket: expected none with " + name + ", got " + std::to_string(spec.bucket);
  }
  if (spec.nonfinite != Nonfinite::error && !family.nonfinite)
    return "nonfinite: expected none with " + name + ", got one";
  if (spec.id != CodecId::topk) return std::nullopt;
  if (!isKeep(spec.keep, spec.bucket)) {
    return std::string("keep: expected ") + kKeeps + ", got " + shortest(spec.keep) +
           (spec.bucket == 0 ? "" : " of chunk=" + std::to_string(spec.bucket));
  }
  const GridFamily* values = gridFamily(spec.values);
  if (!isValueFamily(values) || !isGridBits(*values, spec.value_bits)) {
    return "values: expected a grid codec, got codec " + std::to_string(static_cast<int>(spec.values)) + " of " +
           std::to_string(spec.value_bits) + " bits";
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> misfit(const CodecSpec& spec) {
  const GridFamily* family = gridFamily(spec.id);
  if (const PlainFamily* plain = plainFamily(spec.id)) return plainMisfit(spec, *plain);
  if (family == nullptr) return std::nullopt;
  const std::string name(family->name);
  if (!isGridBits(*family, spec.bits)) {
    return "bits: expected " + gridBits(*family) + ", got " + std::to_string(spec.bits);
  }
  if (spec.rotate && family->rotation != Rotation::option) {
    return "rotate: expected none with " + name + (family->rotation == Rotation::always ? ", which always is" : "") +
           ", got 1";
  }
  if (spec.axis == Axis::channel) {
    if (!family->channels()) return "axis: expected none with " + name + ", got channel";
    if (spec.rotate) return "rotate: expected none with axis=channel, got 1";
    if (!spec.open() && !isGridChannels(spec.bucket)) {
      return std::string("C: expected ") + kGridChannels + ", got " + std::to_string(spec.bucket);
    }
  } else if (!isGridBucket(spec.bucket, isRotated(spec)) && (isRotated(spec) || spec.bucket != kTensorBucket)) {
    return std::string("bucket: expected ") + gridBuckets(isRotated(spec)) +
           (isRotated(spec) ? " where rotated" : " or tensor") + ", got " +
           (spec.bucket == kTensorBucket ? "tensor" : std::to_string(spec.bucket));
  }
  if (spec.gain != 1 && spec.id != CodecId::gauss) return "gain: expected it with gauss, got it with " + name;
  if (!isGain(spec.gain)) return std::string("gain: expected ") + kGains + ", got " + shortest(spec.gain);
  if (spec.meta == Meta::bf16 && !family->bf16()) return "meta: expected fp32 with " + name + ", got bf16";
  if (spec.range != Range::absmax && !family->l2) return "range: expected it with sym or mid, got it with " + name;
  if (spec.unit != 0 && (tiesAll(spec) || needsTable(spec))) {
    return std::string("unit: expected none with ") + (needsTable(spec) ? "levels" : tiesAll(spec)) + ", got " +
           std::to_string(spec.unit);
  }
  return std::nullopt;
}

std::optional<std::string> caution(const CodecSpec& spec) {
  constexpr uint8_t kCoarse = 2;
  constexpr uint32_t kLarge = 512;
  // Grids around 0 with a level at 0 or of one magnitude err less.
  const GridFamily* family = gridFamily(spec.id);
  if (family == nullptr || (family->centred && spec.id != CodecId::mid)) return std::nullopt;
  // So do levels that follow the elements' distribution, and elements that a rotation has mixed.
  if (family->book || isRotated(spec)) return std::nullopt;
  // The size of a channel is unknown until there is a tensor.
  if (spec.bits > kCoarse || spec.axis == Axis::channel) return std::nullopt;
  const bool whole = spec.bucket == kTensorBucket;
  if (spec.bucket < kLarge && !whole) return std::nullopt;
  // Errors of these families with buckets of 1024, from benchmarks/results/codec_errors.md.
  const char* measured = spec.bits == 1 ? "1.1 to 3.1 on weights and 2.8 to 5.7 on gradients"
                                        : "0.5 to 0.9 on weights and 1.0 to 1.8 on gradients";
  return "codec '" + spec.str() + "': " + std::to_string(spec.bits) + (spec.bits == 1 ? " bit is" : " bits are") +
         " coarse for a bucket of " + (whole ? "a whole tensor" : std::to_string(spec.bucket)) +
         ": with 1024 elements the relative error was measured as " + measured + "; use " +
         std::to_string(kCoarse + 1) + " bits or more, or a bucket below " + std::to_string(kLarge);
}

}  // namespace lowcomm

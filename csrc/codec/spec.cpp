#include "codec/spec.h"

#include <limits>

#include "base/error.h"
#include "codec/spec_limits.h"
#include "kernels/finite.h"

namespace lowcomm {
namespace {

std::string plainText(const CodecSpec& spec) {
  const PlainFamily* family = plainFamily(spec.id);
  if (family == nullptr) return "layout";
  std::string options;
  if (spec.stochastic) options += ",round=stochastic";
  if (spec.id == CodecId::topk) {
    const GridFamily* values = gridFamily(spec.values);
    options += ",keep=" + shortest(spec.keep) + ",values=" + (values ? std::string(values->name) : "none");
    if (values && values->named()) options += std::to_string(spec.value_bits);
  }
  if (spec.nonfinite == Nonfinite::saturate) options += ",nonfinite=saturate";
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
  if (family->named()) text += std::to_string(bits);
  if (axis == Axis::channel) {
    text += ":axis=channel" + (bucket == 0 ? "" : ",C=" + std::to_string(bucket));
  } else {
    text += ":bucket=" + (bucket == kTensorBucket ? "tensor" : std::to_string(bucket));
  }
  if (meta != family->default_meta) text += meta == Meta::bf16 ? ",meta=bf16" : ",meta=fp32";
  if (range == Range::l2) text += ",range=l2";
  if (delta != 0) text += ",delta=" + shortest(delta);
  if (rotate) text += ",rotate=1";
  if (gain != 1) text += ",gain=" + shortest(gain);
  if (nonfinite == Nonfinite::saturate) text += ",nonfinite=saturate";
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
  if (family == nullptr) return static_cast<uint8_t>(spec.stochastic ? Rounding::stochastic : Rounding::nearest);
  return static_cast<uint8_t>(static_cast<uint8_t>(family->rounding) | (spec.range == Range::l2 ? kL2Flag : 0) |
                              (spec.meta == Meta::bf16 ? kBf16Flag : 0) |
                              (spec.axis == Axis::channel ? kChannelFlag : 0) | (isRotated(spec) ? kRotatedFlag : 0));
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

CodecSpec valueSpec(const CodecSpec& topk) {
  const GridFamily* family = gridFamily(topk.values);
  CodecSpec spec;
  spec.id = topk.values;
  spec.bits = topk.value_bits;
  if (family != nullptr) spec.bucket = family->default_bucket;
  spec.nonfinite = topk.nonfinite;
  return spec;
}

}  // namespace lowcomm

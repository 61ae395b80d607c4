#include "codec/spec.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <iterator>
#include <limits>
#include <set>
#include <system_error>

#include "codec/codec.h"
#include "codec/error.h"
#include "kernels/finite.h"

namespace lowcomm {

namespace {

constexpr double kDefaultKeep = 0.2;
constexpr std::string_view kDefaultValues = "sym8";

// The published family beyond this version (FORMAT.md, "Numbers kept for later"): refused as not there yet, so that
// nobody takes a typing error for a missing feature or the other way round.
constexpr std::string_view kLaterCodecs[] = {"fake"};
constexpr std::string_view kLaterOptions[] = {"ratio"};
constexpr std::string_view kPresentOptions[] = {"bucket", "axis", "C",     "meta", "range",  "delta",
                                                "rotate", "gain", "round", "keep", "values", "nonfinite"};
constexpr const char* kOptions = "bucket, axis, C, meta, range, delta, rotate, gain, round, keep, values, nonfinite";

template <typename List>
bool contains(const List& list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

[[noreturn]] void fail(std::string_view text, const std::string& why) {
  throw ValueError("codec '" + std::string(text) + "': " + why);
}

[[noreturn]] void notYet(std::string_view text, const std::string& what, const std::string& has) {
  fail(text, "this version does not have " + what + " yet; it has " + has);
}

// A grid of any bits with such a step stays within what fp32 can add up, and its inverse is not infinite.
constexpr const char* kDeltas = "a step of 1e-30...1e30";
bool isDelta(float delta) {
  return delta >= 1e-30f && delta <= 1e30f;
}

constexpr const char* kKeeps = "a share above 0 and at most 1";
bool isKeep(double keep) {
  return keep > 0 && keep <= 1;
}

constexpr const char* kGains = "a factor of 0.001...1000";
bool isGain(float gain) {
  return gain >= 1e-3f && gain <= 1e3f;
}

// The fewest digits that parse to the same number: one number has one text.
template <typename Number>
std::string shortest(Number value) {
  char digits[32];
  const auto written = std::to_chars(digits, digits + sizeof(digits), value);
  return {digits, written.ptr};
}

bool isDigit(char c) {
  return c >= '0' && c <= '9';
}

struct Name {
  std::string_view family;
  std::string_view digits;
};

Name split(std::string_view name) {
  size_t end = name.size();
  while (end > 0 && isDigit(name[end - 1]))
    --end;
  return {name.substr(0, end), name.substr(end)};
}

CodecSpec parseName(std::string_view text, std::string_view name) {
  if (name == "none") return {};
  if (const PlainFamily* plain = plainFamily(name)) {
    CodecSpec spec;
    spec.id = plain->id;
    return spec;
  }
  const Name parts = split(name);
  const GridFamily* family = gridFamily(parts.family);
  if (family == nullptr || (!family->named() && !parts.digits.empty())) {
    if (contains(kLaterCodecs, name)) notYet(text, std::string(name), codecNames());
    fail(text, "name: expected one of " + codecNames() + ", got '" + std::string(name) + "'");
  }
  CodecSpec spec;
  spec.id = family->id;
  if (!family->named()) spec.bits = family->least_bits;
  if (family->named() && parts.digits.size() == 1) spec.bits = static_cast<uint8_t>(parts.digits[0] - '0');
  if (!isGridBits(*family, spec.bits)) {
    fail(text, "bits: expected " + gridBits(*family) + " after '" + std::string(parts.family) + "', got '" +
                   std::string(parts.digits) + "'");
  }
  spec.bucket = family->default_bucket;
  spec.meta = family->default_meta;
  return spec;
}

// 0 for what is no positive number. A leading zero would parse too, but one number would then have two spellings.
uint32_t parseCount(std::string_view value) {
  uint32_t count = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), count);
  return error == std::errc() && end == value.data() + value.size() && value[0] != '0' ? count : 0;
}

uint32_t parseBucket(std::string_view text, std::string_view value) {
  if (value == "tensor") return kTensorBucket;
  const uint32_t bucket = parseCount(value);
  if (!isGridBucket(bucket)) {
    fail(text, std::string("bucket: expected ") + gridBuckets(false) + " or tensor, got '" + std::string(value) + "'");
  }
  return bucket;
}

// `of` is the option's name, `allowed` says in words what `isAllowed` takes.
template <typename Number>
Number parseNumber(std::string_view text, const char* of, std::string_view value, bool (*isAllowed)(Number),
                   const char* allowed) {
  Number number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || !isAllowed(number)) {
    fail(text, std::string(of) + ": expected " + allowed + ", got '" + std::string(value) + "'");
  }
  return number;
}

// Values of topk are one tensor of their own: on plain grids alone, for a rotation or a table serves a whole tensor.
bool isValueFamily(const GridFamily* family) {
  return family != nullptr && !family->book;
}

void parseValues(std::string_view text, std::string_view value, CodecSpec& spec) {
  // Looked for first: a name alone is parsed, so that a text of such options in each other nests no calls.
  const bool named = value.find(':') == std::string_view::npos;
  const CodecSpec values = named ? parseName(text, value) : CodecSpec{};
  if (!isValueFamily(gridFamily(values.id))) {
    fail(text, "values: expected the name of a grid codec without options, got '" + std::string(value) + "'");
  }
  spec.values = values.id;
  spec.value_bits = values.bits;
}

void parseOption(std::string_view text, std::string_view option, CodecSpec& spec, std::set<std::string_view>& seen) {
  const size_t equals = option.find('=');
  if (equals == std::string_view::npos || equals == 0 || equals + 1 == option.size()) {
    fail(text, "option: expected key=value, got '" + std::string(option) + "'");
  }
  const std::string_view key = option.substr(0, equals), value = option.substr(equals + 1);
  if (spec.id == CodecId::none) fail(text, "option: expected none for this codec, got '" + std::string(key) + "'");
  if (!seen.insert(key).second) fail(text, std::string(key) + ": expected once, got it twice");
  const PlainFamily* plain = plainFamily(spec.id);
  const bool of_topk = key == "keep" || key == "values";
  const bool fits = plain ? (key == "round" && plain->stochastic) || (key == "nonfinite" && plain->nonfinite) ||
                                (of_topk && spec.id == CodecId::topk)
                          : key != "round" && !of_topk;
  if (!fits && contains(kPresentOptions, key)) {
    fail(text, std::string(key) + ": expected it with another codec, got it with '" +
                   std::string(text.substr(0, text.find(':'))) + "'");
  }
  if (key == "bucket") {
    spec.bucket = parseBucket(text, value);
  } else if (key == "axis") {
    if (value != "channel") fail(text, "axis: expected channel, got '" + std::string(value) + "'");
    spec.axis = Axis::channel;
  } else if (key == "C") {
    spec.bucket = parseCount(value);
    if (!isGridChannels(spec.bucket)) {
      fail(text, std::string("C: expected ") + kGridChannels + ", got '" + std::string(value) + "'");
    }
  } else if (key == "round") {
    if (value != "nearest" && value != "stochastic") {
      fail(text, "round: expected nearest or stochastic, got '" + std::string(value) + "'");
    }
    spec.stochastic = value == "stochastic";
  } else if (key == "keep") {
    spec.keep = parseNumber(text, "keep", value, isKeep, kKeeps);
  } else if (key == "values") {
    parseValues(text, value, spec);
  } else if (key == "meta") {
    if (value != "fp32" && value != "bf16") fail(text, "meta: expected fp32 or bf16, got '" + std::string(value) + "'");
    spec.meta = value == "bf16" ? Meta::bf16 : Meta::fp32;
  } else if (key == "range") {
    if (value != "absmax" && value != "l2") {
      fail(text, "range: expected absmax or l2, got '" + std::string(value) + "'");
    }
    spec.range = value == "l2" ? Range::l2 : Range::absmax;
  } else if (key == "delta") {
    spec.delta = parseNumber(text, "delta", value, isDelta, kDeltas);
  } else if (key == "rotate") {
    if (value != "0" && value != "1") fail(text, "rotate: expected 0 or 1, got '" + std::string(value) + "'");
    spec.rotate = value == "1";
  } else if (key == "gain") {
    spec.gain = parseNumber(text, "gain", value, isGain, kGains);
  } else if (key == "nonfinite") {
    if (value == "saturate") {
      spec.nonfinite = Nonfinite::saturate;
    } else if (value == "poison") {
      spec.nonfinite = Nonfinite::poison;
    } else if (value != "error") {
      fail(text, "nonfinite: expected error, saturate or poison, got '" + std::string(value) + "'");
    }
  } else if (contains(kLaterOptions, key)) {
    notYet(text, "the option " + std::string(key), kOptions);
  } else {
    fail(text, std::string("option: expected one of ") + kOptions + ", got '" + std::string(key) + "'");
  }
}

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

std::optional<std::string> plainMisfit(const CodecSpec& spec, const PlainFamily& family) {
  const std::string name(family.name);
  if (spec.bits != 0) return "bits: expected 0 with " + name + ", got " + std::to_string(spec.bits);
  if (spec.bucket != 0) return "bucket: expected none with " + name + ", got " + std::to_string(spec.bucket);
  if (spec.stochastic && !family.stochastic) return "round: expected nearest with " + name + ", got stochastic";
  if (spec.nonfinite != Nonfinite::error && !family.nonfinite)
    return "nonfinite: expected none with " + name + ", got one";
  if (spec.id != CodecId::topk) return std::nullopt;
  if (!isKeep(spec.keep)) return std::string("keep: expected ") + kKeeps + ", got " + shortest(spec.keep);
  const GridFamily* values = gridFamily(spec.values);
  if (!isValueFamily(values) || !isGridBits(*values, spec.value_bits)) {
    return "values: expected a grid codec, got codec " + std::to_string(static_cast<int>(spec.values)) + " of " +
           std::to_string(spec.value_bits) + " bits";
  }
  return std::nullopt;
}

}  // namespace

std::string gridBits(const GridFamily& family) {
  const std::string least = std::to_string(family.least_bits);
  return family.least_bits == family.most_bits ? least : least + "..." + std::to_string(family.most_bits);
}

CodecSpec CodecSpec::parse(std::string_view text) {
  const size_t colon = text.find(':');
  CodecSpec spec = parseName(text, text.substr(0, colon));
  if (spec.id == CodecId::topk) {
    spec.keep = kDefaultKeep;
    parseValues(text, kDefaultValues, spec);
  }
  if (colon == std::string_view::npos) return spec;
  std::set<std::string_view> seen;
  std::string_view rest = text.substr(colon + 1);
  while (true) {
    const size_t comma = rest.find(',');
    parseOption(text, rest.substr(0, comma), spec, seen);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  if (spec.axis == Axis::channel) {
    if (seen.contains("bucket")) fail(text, "bucket: expected none with axis=channel, got one");
    if (!seen.contains("C")) spec.bucket = 0;
  } else if (seen.contains("C")) {
    fail(text, "C: expected it with axis=channel, got it alone");
  }
  if (const auto why = misfit(spec)) fail(text, *why);
  return spec;
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
  if (spec.delta != 0 && !family->delta) return "delta: expected it with qsgd or lattice, got it with " + name;
  if (spec.meta == Meta::bf16 && spec.delta != 0) return "meta: expected fp32 with delta, got bf16";
  if (spec.range != Range::absmax && !family->l2) return "range: expected it with sym or mid, got it with " + name;
  if (spec.delta != 0 && !isDelta(spec.delta)) {
    return std::string("delta: expected ") + kDeltas + ", got " + shortest(spec.delta);
  }
  return std::nullopt;
}

std::optional<std::string> caution(const CodecSpec& spec) {
  constexpr uint8_t kCoarse = 2;
  constexpr uint32_t kLarge = 512;
  // Grids around 0 with a level at 0 or of one magnitude err less.
  const GridFamily* family = gridFamily(spec.id);
  if (family == nullptr || (family->centred && spec.id != CodecId::mid)) return std::nullopt;
  // So do levels that follow the elements' distribution, and elements that a rotation has made alike.
  if (family->book || isRotated(spec)) return std::nullopt;
  // How large a channel is, nobody knows before there is a tensor.
  if (spec.bits > kCoarse || spec.delta != 0 || spec.axis == Axis::channel) return std::nullopt;
  const bool whole = spec.bucket == kTensorBucket;
  if (spec.bucket < kLarge && !whole) return std::nullopt;
  return "codec '" + spec.str() + "': the relative error of " + std::to_string(spec.bits) +
         (spec.bits == 1 ? " bit" : " bits") + " with a bucket of " +
         (whole ? "a whole tensor" : std::to_string(spec.bucket)) + " is near 1 or above; use " +
         std::to_string(kCoarse + 1) + " bits or more, or a bucket below " + std::to_string(kLarge);
}

}  // namespace lowcomm

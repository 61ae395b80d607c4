// From a user's text to a codec's options.
#include <algorithm>
#include <charconv>
#include <cstddef>
#include <iterator>
#include <set>
#include <system_error>

#include "base/error.h"
#include "codec/codec.h"
#include "codec/spec.h"

namespace lowcomm {
namespace {

constexpr double kDefaultKeep = 0.2;
constexpr std::string_view kDefaultValues = "sym8";

// The published family that this version lacks (FORMAT.md, "Numbers kept for later"): its error says "not yet", so that
// a missing feature does not look like a typing error.
constexpr std::string_view kLaterCodecs[] = {"fake"};
constexpr std::string_view kLaterOptions[] = {"ratio"};
constexpr std::string_view kPresentOptions[] = {"bucket", "axis", "C",     "meta", "range",  "rotate",
                                                "gain",   "unit", "chunk", "keep", "values", "nonfinite"};
// As an error names them: without C, which a canonical text has and no user needs.
constexpr const char* kOptions = "bucket, axis, meta, range, rotate, gain, unit, chunk, keep, values, nonfinite";

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
  if (family == nullptr) {
    if (contains(kLaterCodecs, name)) notYet(text, std::string(name), codecNames());
    fail(text, "name: expected one of " + codecNames() + ", got '" + std::string(name) + "'");
  }
  CodecSpec spec;
  spec.id = family->id;
  if (parts.digits.size() == 1) spec.bits = static_cast<uint8_t>(parts.digits[0] - '0');
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

uint32_t parseBucket(std::string_view text, std::string_view of, std::string_view value) {
  const bool may_be_tensor = of == "bucket";
  if (may_be_tensor && value == "tensor") return kTensorBucket;
  const uint32_t bucket = parseCount(value);
  if (!isGridBucket(bucket)) {
    fail(text, std::string(of) + ": expected " + gridBuckets(false) + (may_be_tensor ? " or tensor" : "") + ", got '" +
                   std::string(value) + "'");
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
  const bool of_topk = key == "chunk" || key == "keep" || key == "values";
  const bool fits =
      plain ? (key == "nonfinite" && plain->nonfinite) || (of_topk && spec.id == CodecId::topk) : !of_topk;
  if (!fits && contains(kPresentOptions, key)) {
    fail(text, std::string(key) + ": expected it with another codec, got it with '" +
                   std::string(text.substr(0, text.find(':'))) + "'");
  }
  if (key == "bucket" || key == "chunk") {
    spec.bucket = parseBucket(text, key, value);
  } else if (key == "axis") {
    if (value != "channel") fail(text, "axis: expected channel, got '" + std::string(value) + "'");
    spec.axis = Axis::channel;
  } else if (key == "C") {
    spec.bucket = parseCount(value);
    if (!isGridChannels(spec.bucket)) {
      fail(text, std::string("C: expected ") + kGridChannels + ", got '" + std::string(value) + "'");
    }
  } else if (key == "keep") {
    spec.keep = parseNumber<double>(text, "keep", value, [](double keep) { return keep > 0; }, kKeeps);
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
  } else if (key == "rotate") {
    if (value != "0" && value != "1") fail(text, "rotate: expected 0 or 1, got '" + std::string(value) + "'");
    spec.rotate = value == "1";
  } else if (key == "gain") {
    spec.gain = parseNumber(text, "gain", value, isGain, kGains);
  } else if (key == "unit") {
    spec.unit = parseNumber(text, "unit", value, isUnit, kUnits);
  } else if (key == "nonfinite") {
    if (value != "error" && value != "poison") {
      fail(text, "nonfinite: expected error or poison, got '" + std::string(value) + "'");
    }
    spec.nonfinite = value == "poison" ? Nonfinite::poison : Nonfinite::error;
  } else if (contains(kLaterOptions, key)) {
    notYet(text, "the option " + std::string(key), kOptions);
  } else {
    fail(text, std::string("option: expected one of ") + kOptions + ", got '" + std::string(key) + "'");
  }
}

}  // namespace

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
  if (seen.contains("chunk") && !seen.contains("keep")) fail(text, "keep: expected it with chunk, got none");
  if (const auto why = misfit(spec)) fail(text, *why);
  return spec.unit == 0 ? spec : spec.withUnit(spec.unit);
}

}  // namespace lowcomm

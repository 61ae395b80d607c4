#include "backend/options.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>

#include "base/error.h"
#include "collective/plan.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/tls.h"

namespace lowcomm {

namespace {

// Notes whether the environment has a secret (transport/tcp/secret.h). Throws ValueError for what a group with one may
// not have: NCCL, whose connections nothing encrypts, or a build without TLS.
void applySecret(Settings& settings) {
  const auto secret = tcp::Secret::fromEnvironment();
  if (!secret) return;
  if (tcp::tlsLibrary().empty()) throw ValueError(secret->from() + ": " + tcp::kWithoutTls);
  if (settings.nccl)
    throw ValueError("nccl: expected None or False with " + secret->from() + ", as NCCL encrypts nothing, got True");
  settings.secret = true;
}

// Without the spaces around it; empty where `text` is null.
std::string trimmed(const char* text) {
  constexpr const char* kSpaces = " \t\r\n";
  const std::string whole = text ? text : "";
  const size_t first = whole.find_first_not_of(kSpaces);
  return first == std::string::npos ? "" : whole.substr(first, whole.find_last_not_of(kSpaces) - first + 1);
}

int64_t parseInteger(const char* name, const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (errno != 0 || end == text.c_str() || *end != '\0') {
    throw ValueError(std::string(name) + ": expected an integer, got '" + text + "'");
  }
  return value;
}

const char* environment(const char* variable) {
  return std::getenv(variable);
}
const char* noEnvironment(const char*) {
  return nullptr;
}
using Lookup = const char* (*)(const char* variable);

// The user's value, else the environment's, checked against [low, high] under the name it came by; else the default.
uint64_t integer(Lookup lookup, const std::optional<int64_t>& given, const char* field, const char* variable,
                 uint64_t otherwise, int64_t low, int64_t high) {
  const std::string text = trimmed(lookup(variable));
  if (!given && text.empty()) return otherwise;
  const char* from = given ? field : variable;
  const int64_t value = given ? *given : parseInteger(variable, text);
  if (value < low || value > high) {
    throw ValueError(std::string(from) + ": expected " + std::to_string(low) + " ... " + std::to_string(high) +
                     ", got " + std::to_string(value));
  }
  return static_cast<uint64_t>(value);
}

// A switch as a number, which environment variables give it as.
std::optional<int64_t> number(const std::optional<bool>& given) {
  return given ? std::optional<int64_t>(*given) : std::nullopt;
}

constexpr int64_t kMostConnections = 64;
constexpr int64_t kMostRecorded = 65536;

Settings fill(const Options& o, Lookup lookup) {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  Settings settings;
  if (o.policy) {
    settings.policy = Policy::parse(*o.policy);
  } else if (const char* text = lookup("LOWCOMM_POLICY")) {
    try {
      settings.policy = Policy::parse(text);
    } catch (const ValueError& error) {
      throw ValueError(std::string("LOWCOMM_POLICY: ") + error.what());
    }
  }
  settings.min_bytes = integer(lookup, o.min_bytes, "min_bytes", "LOWCOMM_MIN_BYTES", settings.min_bytes, 0, kAny);
  settings.seed = integer(lookup, o.seed, "seed", "LOWCOMM_SEED", settings.seed, 0, kAny);
  settings.chunk_bytes = integer(lookup, o.chunk_bytes, "chunk_bytes", "LOWCOMM_CHUNK_BYTES", settings.chunk_bytes,
                                 kMinChunkBytes, kMaxChunkBytes);
  settings.connections =
      integer(lookup, o.connections, "connections", "LOWCOMM_CONNECTIONS", settings.connections, 1, kMostConnections);
  settings.flight_record = integer(lookup, o.flight_record, "flight_record", "LOWCOMM_FLIGHT_RECORD",
                                   settings.flight_record, 0, kMostRecorded);
  settings.encode_on_device = integer(lookup, number(o.encode_on_device), "encode_on_device",
                                      "LOWCOMM_ENCODE_ON_DEVICE", settings.encode_on_device, 0, 1) == 1;
  settings.nccl = integer(lookup, number(o.nccl), "nccl", "LOWCOMM_NCCL", settings.nccl, 0, 1) == 1;
  return settings;
}

}  // namespace

void checkTimeout(std::chrono::milliseconds timeout) {
  if (timeout > std::chrono::milliseconds(0)) return;
  throw ValueError("timeout: expected more than 0, got " + std::to_string(timeout.count()) + " ms");
}

void Options::check() const {
  fill(*this, noEnvironment);
  if (timeout_set) checkTimeout(timeout);
}

Settings Options::resolve() const {
  checkTimeout(timeout);
  Settings settings = fill(*this, environment);
  applySecret(settings);
  return settings;
}

void Options::inherit(const Settings& parent) {
  const auto fill = [](std::optional<int64_t>& field, uint64_t value) {
    if (!field) field = static_cast<int64_t>(value);
  };
  if (!policy) policy = parent.policy.str();
  fill(min_bytes, parent.min_bytes);
  fill(seed, parent.seed);
  fill(chunk_bytes, parent.chunk_bytes);
  if (parent.connections > 0) fill(connections, parent.connections);
  fill(flight_record, parent.flight_record);
  if (!encode_on_device) encode_on_device = parent.encode_on_device;
  if (!nccl) nccl = parent.nccl;
}

std::string Options::repr() const {
  auto shown = [](const std::optional<int64_t>& value) { return value ? std::to_string(*value) : std::string("None"); };
  auto truth = [](const std::optional<bool>& value) { return value ? (*value ? "True" : "False") : "None"; };
  return "Options(policy=" + (policy ? "'" + *policy + "'" : std::string("None")) + ", min_bytes=" + shown(min_bytes) +
         ", seed=" + shown(seed) + ", chunk_bytes=" + shown(chunk_bytes) + ", connections=" + shown(connections) +
         ", flight_record=" + shown(flight_record) + ", encode_on_device=" + truth(encode_on_device) +
         ", nccl=" + truth(nccl) +
         ", timeout=" + (timeout_set ? std::to_string(timeout.count()) + " ms" : std::string("None")) + ")";
}

namespace {

constexpr std::array<std::string_view, 7> kCompressed = {
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "p2p"};

std::string names() {
  std::string text;
  for (std::string_view name : kCompressed)
    text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

void checkOp(const std::string& op) {
  if (std::find(kCompressed.begin(), kCompressed.end(), op) != kCompressed.end()) return;
  throw ValueError("policy: unknown op '" + op + "', expected one of " + names());
}

// Whether ranks of an op may give the same elements other shapes and mean it (`broadcast(x.view(-1) if rank == 0 else
// x)`): with axis=channel each would decide by its own whether and how it encodes.
bool shapesMayDiffer(const std::string& op) {
  return op == "all_reduce" || op == "all_to_all" || op == "broadcast" || op == "gather";
}

CodecSpec codecOf(const std::string& op, std::string_view text) {
  try {
    return CodecSpec::parse(text);
  } catch (const ValueError& error) {
    std::string what = "policy: " + op + ": " + error.what();
    const auto named = [&](std::string_view name) {
      return text.find(std::string(name) + "=") != std::string_view::npos;
    };
    if (std::any_of(kCompressed.begin(), kCompressed.end(), named)) what += " (entries are separated by ';')";
    throw ValueError(what);
  }
}

}  // namespace

Policy Policy::parse(std::string_view text) {
  Policy policy;
  while (!text.empty()) {
    const auto end = text.find(';');
    const std::string_view part = trimmed(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
    if (part.empty()) continue;
    const auto equals = part.find('=');
    if (equals == std::string_view::npos) {
      throw ValueError("policy: expected 'op=codec', got '" + std::string(part) + "'");
    }
    const std::string op(trimmed(part.substr(0, equals)));
    checkOp(op);
    const CodecSpec codec = codecOf(op, trimmed(part.substr(equals + 1)));
    if (needsTable(codec)) {
      throw ValueError("policy: " + op + ": expected a codec that needs no level table, got '" + codec.str() +
                       "', for which a group has none");
    }
    if ((codec.axis == Axis::channel && shapesMayDiffer(op)) || codec.unit != 0) {
      throw ValueError("policy: " + op + ": expected a codec that does not follow a tensor's shape, got '" +
                       codec.str() + "'");
    }
    if (policy.codecs_.contains(op)) throw ValueError("policy: '" + op + "' is named twice");
    policy.codecs_.emplace(op, codec);
  }
  // "none" is how a user writes exact; it is the same as saying nothing.
  std::erase_if(policy.codecs_, [](const auto& entry) { return entry.second.id == CodecId::none; });
  return policy;
}

std::string Policy::str() const {
  std::string text;
  for (const auto& [op, codec] : codecs_)
    text += (text.empty() ? "" : "; ") + op + "=" + codec.str();
  return text;
}

std::optional<CodecSpec> Policy::codec(const std::string& op) const {
  auto found = codecs_.find(op);
  if (found == codecs_.end()) return std::nullopt;
  return found->second;
}

std::optional<std::string> untaken(const CodecSpec& codec, std::span<const int64_t> sizes) {
  if (codec.axis == Axis::channel) {
    if (sizes.size() < 2) return "axis=channel of a tensor without channels";
    const int64_t channels = sizes.back();
    if (channels > UINT32_MAX || !isGridChannels(static_cast<uint32_t>(channels))) {
      return std::string("axis=channel of a last dimension that is not ") + kGridChannels;
    }
    if (!codec.open() && codec.bucket != channels) return "axis=channel of another number of channels than C";
  } else if (isGrid(codec.id) && codec.bucket == kTensorBucket) {
    uint64_t count = 1;
    for (int64_t size : sizes)
      count *= static_cast<uint64_t>(size);
    if (count > kLongestTensor) return "bucket=tensor of more than " + std::to_string(kLongestTensor) + " elements";
  }
  return std::nullopt;
}

}  // namespace lowcomm

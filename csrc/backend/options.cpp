#include "backend/options.h"

#include <cstdlib>
#include <limits>

#include "base/error.h"
#include "collective/plan.h"

namespace lowcomm {
namespace {

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

// The user's value, else the environment's, else the default; checked against [low, high] under the name it came by.
uint64_t integer(Lookup lookup, const std::optional<int64_t>& given, const char* field, const char* variable,
                 uint64_t otherwise, int64_t low, int64_t high) {
  const char* from = field;
  int64_t value = static_cast<int64_t>(otherwise);
  if (given) {
    value = *given;
  } else if (const std::string text = trimmed(lookup(variable)); !text.empty()) {
    from = variable;
    value = parseInteger(variable, text);
  }
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
  settings.ring_from = integer(lookup, o.ring_from, "ring_from", "LOWCOMM_RING_FROM", settings.ring_from, 0, kAny);
  settings.flight_record = integer(lookup, o.flight_record, "flight_record", "LOWCOMM_FLIGHT_RECORD",
                                   settings.flight_record, 0, kMostRecorded);
  settings.staged = integer(lookup, number(o.staged), "staged", "LOWCOMM_STAGED", settings.staged, 0, 1) == 1;
  const char* text = lookup("LOWCOMM_NCCL");
  if (o.nccl || (text && !trimmed(text).empty()))
    settings.nccl = integer(lookup, number(o.nccl), "nccl", "LOWCOMM_NCCL", 0, 0, 1) == 1;
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
  return fill(*this, environment);
}

void Options::inherit(const Settings& parent) {
  const auto fill = [](std::optional<int64_t>& field, uint64_t value) {
    if (!field) field = static_cast<int64_t>(value);
  };
  if (!policy) policy = parent.policy.str();
  fill(min_bytes, parent.min_bytes);
  fill(seed, parent.seed);
  fill(chunk_bytes, parent.chunk_bytes);
  fill(connections, parent.connections);
  fill(ring_from, parent.ring_from);
  fill(flight_record, parent.flight_record);
  if (!staged) staged = parent.staged;
  if (!nccl) nccl = parent.nccl;
}

std::string Options::repr() const {
  auto shown = [](const std::optional<int64_t>& value) { return value ? std::to_string(*value) : std::string("None"); };
  auto truth = [](const std::optional<bool>& value) { return value ? (*value ? "True" : "False") : "None"; };
  return "Options(policy=" + (policy ? "'" + *policy + "'" : std::string("None")) + ", min_bytes=" + shown(min_bytes) +
         ", seed=" + shown(seed) + ", chunk_bytes=" + shown(chunk_bytes) + ", connections=" + shown(connections) +
         ", ring_from=" + shown(ring_from) + ", flight_record=" + shown(flight_record) + ", staged=" + truth(staged) +
         ", nccl=" + truth(nccl) +
         ", timeout=" + (timeout_set ? std::to_string(timeout.count()) + " ms" : std::string("None")) + ")";
}

}  // namespace lowcomm

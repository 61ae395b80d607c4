#include "backend/policy.h"

#include <algorithm>
#include <array>

#include "base/error.h"

namespace lowcomm {
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
    if (codec.axis == Axis::channel && shapesMayDiffer(op)) {
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

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "codec/spec.h"

namespace lowcomm {

// An allow-list: which codec each op may use. Empty is exact.
//
// Text: "op=codec; op=codec", for example "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd8".
class Policy {
 public:
  Policy() = default;

  // Throws ValueError naming the part that is wrong: no such op, an op this version does not compress, an op named
  // twice, a codec that CodecSpec::parse refuses or that needsTable.
  static Policy parse(std::string_view text);

  // Canonical text, ops in alphabetical order; parse(str()) is the same policy.
  std::string str() const;

  // The codec for an op ("all_gather", "p2p", "reduce_scatter"), or nothing: exact.
  std::optional<CodecSpec> codec(const std::string& op) const;

  bool empty() const { return codecs_.empty(); }

 private:
  std::map<std::string, CodecSpec> codecs_;
};

// Why a tensor of these sizes cannot be encoded with a policy's codec, or nothing where it can. It then goes exact, as
// everything does that a policy names but no codec takes.
std::optional<std::string> untaken(const CodecSpec& codec, std::span<const int64_t> sizes);

}  // namespace lowcomm

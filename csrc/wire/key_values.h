#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lowcomm {

// The fields that ranks must agree on before they talk: an ordered list of named fields ("wire_version", "policy",
// ...). A rank that cannot join says why in a field "error".
struct KeyValues {
  std::vector<std::pair<std::string, std::string>> fields;

  // `key=value` lines; values are escaped (\n, \\). parse throws WireError on anything else.
  std::string text() const;
  static KeyValues parse(std::string_view text);
};

// Throws WireError that names the first field that differs, both values and both ranks
// ("policy differs: rank 0 has 'all_gather=minmax8:bucket=1024', rank 1 has ''"), or the peer's "error" field. Of long
// values it shows some 200 characters around the first that differs, line ends and backslashes escaped.
void expectSameFields(const KeyValues& mine, int my_rank, const KeyValues& theirs, int their_rank);

}  // namespace lowcomm

#include "wire/key_values.h"

#include <algorithm>
#include <cstddef>

#include "base/error.h"

namespace lowcomm {

namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

// Values may be the texts of whole layouts; a message shows this many characters of one.
constexpr size_t kShown = 200;
constexpr size_t kShownBefore = 100;  // of those, before the first that differs
constexpr size_t kShownReason = 1024;

// At most `most` characters of `value` from `start` on, with an ellipsis where something is left out.
std::string window(std::string_view value, size_t start, size_t most) {
  const std::string_view part = value.substr(start, most);
  return (start > 0 ? "..." : "") + std::string(part) + (start + part.size() < value.size() ? "..." : "");
}

const std::string* find(const Fields& fields, std::string_view key) {
  const auto at = std::find_if(fields.begin(), fields.end(), [&](const auto& field) { return field.first == key; });
  return at == fields.end() ? nullptr : &at->second;
}

bool isKey(std::string_view key) {
  return !key.empty() && key.find_first_of("=\n\\") == std::string_view::npos;
}

std::string escaped(std::string_view value) {
  std::string out;
  for (char c : value) {
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\\') {
      out += "\\\\";
    } else {
      out += c;
    }
  }
  return out;
}

std::string unescaped(std::string_view value) {
  std::string out;
  for (size_t i = 0; i < value.size(); ++i) {
    if (value[i] != '\\') {
      out += value[i];
      continue;
    }
    const char next = i + 1 < value.size() ? value[i + 1] : '\0';
    if (next != 'n' && next != '\\') {
      throw WireError("key-value text: value: expected \\n or \\\\ after a backslash, got '" +
                      std::string(value.substr(i, 2)) + "'");
    }
    out += next == 'n' ? '\n' : '\\';
    ++i;
  }
  return out;
}

[[noreturn]] void differs(const std::string& key, int my_rank, const std::string* mine, int their_rank,
                          const std::string* theirs) {
  size_t start = 0;
  if (mine && theirs && std::max(mine->size(), theirs->size()) > kShown) {
    const auto [at, other] = std::mismatch(mine->begin(), mine->end(), theirs->begin(), theirs->end());
    start = std::max<size_t>(at - mine->begin(), kShownBefore) - kShownBefore;
  }
  const auto has = [&](const std::string* value) {
    return value ? "has '" + escaped(window(*value, start, kShown)) + "'" : std::string("has none");
  };
  throw WireError(window(key, 0, kShown) + " differs: rank " + std::to_string(my_rank) + " " + has(mine) + ", rank " +
                  std::to_string(their_rank) + " " + has(theirs));
}

}  // namespace

std::string KeyValues::text() const {
  std::string out;
  for (const auto& [key, value] : fields) {
    if (!isKey(key)) throw ValueError("key-value text: key: expected no '=', line end or backslash, got '" + key + "'");
    out += key + "=" + escaped(value) + "\n";
  }
  return out;
}

KeyValues KeyValues::parse(std::string_view text) {
  KeyValues parsed;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) {
      throw WireError("key-value text: expected a line end, got '" + window(text, 0, kShown) + "'");
    }
    const std::string_view line = text.substr(0, end);
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos || !isKey(line.substr(0, equals))) {
      throw WireError("key-value text: line: expected key=value, got '" + window(line, 0, kShown) + "'");
    }
    const std::string_view key = line.substr(0, equals);
    if (find(parsed.fields, key))
      throw WireError("key-value text: " + window(key, 0, kShown) + ": expected once, got it twice");
    parsed.fields.emplace_back(key, unescaped(line.substr(equals + 1)));
    text.remove_prefix(end + 1);
  }
  return parsed;
}

void expectSameFields(const KeyValues& mine, int my_rank, const KeyValues& theirs, int their_rank) {
  // A rank that cannot join lacks other fields too; its reason is what a user needs to read.
  if (const std::string* error = find(theirs.fields, "error")) {
    throw WireError("rank " + std::to_string(their_rank) + ": " + window(*error, 0, kShownReason));
  }
  if (const std::string* error = find(mine.fields, "error")) {
    throw WireError("rank " + std::to_string(my_rank) + ": " + window(*error, 0, kShownReason));
  }
  for (const auto& [key, value] : mine.fields) {
    const std::string* other = find(theirs.fields, key);
    if (!other || *other != value) differs(key, my_rank, &value, their_rank, other);
  }
  for (const auto& [key, value] : theirs.fields) {
    if (!find(mine.fields, key)) differs(key, my_rank, nullptr, their_rank, &value);
  }
}

}  // namespace lowcomm

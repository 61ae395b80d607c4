#pragma once

#include <cstdint>
#include <string_view>

namespace lowcomm {

// 64-bit FNV-1a, part of the format (FORMAT.md, "Layouts", "Descriptions"). It tells texts apart that differ by
// mistake, not by intent.
constexpr uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : text)
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace lowcomm

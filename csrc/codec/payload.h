#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

#include "base/error.h"

namespace lowcomm {

// Payloads and the metadata in them end on a multiple of 64 bytes: a cache line, and the alignment of what follows.
constexpr size_t up64(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// A bit that carries nothing must be 0, so that one tensor has one payload and later versions may give it a meaning.
inline void expectZero(std::span<const std::byte> bytes, const std::string& codec, const char* what) {
  const auto bad = std::find_if(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte{0}; });
  if (bad == bytes.end()) return;
  throw WireError(codec + ": " + what + ": expected 0, got " + std::to_string(std::to_integer<int>(*bad)) +
                  " at its byte " + std::to_string(bad - bytes.begin()));
}

template <typename Error>
void expectBytes(const std::string& codec, size_t expected, size_t got) {
  if (got != expected) {
    throw Error(codec + ": payload: expected " + std::to_string(expected) + " bytes, got " + std::to_string(got));
  }
}

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "base/error.h"

namespace lowcomm {

// Reads little-endian numbers from a peer's bytes, never past their end. It checks no value: that is the
// caller's part.
class Cursor {
 public:
  // `what` names the thing parsed in errors and outlives the cursor.
  Cursor(std::span<const std::byte> bytes, const char* what) : bytes_(bytes), what_(what) {}

  template <typename T>
  T read(const char* field) {
    if (bytes_.size() - at_ < sizeof(T)) {
      throw WireError(std::string(what_) + ": " + field + ": expected " + std::to_string(sizeof(T)) +
                      " bytes at byte " + std::to_string(at_) + ", got " + std::to_string(bytes_.size() - at_));
    }
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }

  // The next `count` bytes.
  std::span<const std::byte> take(uint64_t count, const char* field) {
    if (count > left()) {
      throw WireError(std::string(what_) + ": " + field + ": expected " + std::to_string(count) + " bytes at byte " +
                      std::to_string(at_) + ", got " + std::to_string(left()));
    }
    at_ += count;
    return bytes_.subspan(at_ - count, count);
  }

  size_t left() const { return bytes_.size() - at_; }

 private:
  std::span<const std::byte> bytes_;
  const char* what_;
  size_t at_ = 0;
};

// Writes little-endian numbers, one behind the other. The caller sees to the room.
class Writer {
 public:
  explicit Writer(std::byte* to) : to_(to) {}

  template <typename T>
  Writer& put(T value) {
    std::memcpy(to_, &value, sizeof(T));
    to_ += sizeof(T);
    return *this;
  }

  Writer& put(std::span<const std::byte> bytes) {
    if (!bytes.empty()) std::memcpy(to_, bytes.data(), bytes.size());
    to_ += bytes.size();
    return *this;
  }

 private:
  std::byte* to_;
};

}  // namespace lowcomm

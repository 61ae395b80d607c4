#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace lowcomm {

// Element types as they stand in byte 9 of a frame header (wire/FORMAT.md). The numbers are the format: never reuse
// one.
enum class DType : uint8_t {
  opaque = 0,  // one byte an element; anything that is only carried, never read
  float32 = 1,
  float16 = 2,
  bfloat16 = 3,
  float64 = 4,
  int8 = 5,
  uint8 = 6,
  int16 = 7,
  int32 = 8,
  int64 = 9,
  boolean = 10,
};

struct DTypeInfo {
  const char* name;
  size_t bytes;  // of one element
};

// By number.
inline constexpr DTypeInfo kDTypes[] = {{"opaque", 1},  {"float32", 4}, {"float16", 2}, {"bfloat16", 2},
                                        {"float64", 8}, {"int8", 1},    {"uint8", 1},   {"int16", 2},
                                        {"int32", 4},   {"int64", 8},   {"bool", 1}};

// "unknown" and 0 bytes for a number that is no DType.
constexpr DTypeInfo dtypeInfo(DType dtype) {
  const auto number = static_cast<size_t>(dtype);
  return number < std::size(kDTypes) ? kDTypes[number] : DTypeInfo{"unknown", 0};
}

constexpr size_t itemBytes(DType dtype) {
  return dtypeInfo(dtype).bytes;
}

constexpr const char* dtypeName(DType dtype) {
  return dtypeInfo(dtype).name;
}

}  // namespace lowcomm

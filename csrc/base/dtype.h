#pragma once

#include <cstddef>
#include <cstdint>

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

// Bytes of one element; 0 for a number that is no DType.
constexpr size_t itemBytes(DType dtype) {
  switch (dtype) {
    case DType::opaque:
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
      return 1;
    case DType::float16:
    case DType::bfloat16:
    case DType::int16:
      return 2;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float64:
    case DType::int64:
      return 8;
  }
  return 0;
}

constexpr const char* dtypeName(DType dtype) {
  switch (dtype) {
    case DType::opaque:
      return "opaque";
    case DType::float32:
      return "float32";
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float64:
      return "float64";
    case DType::int8:
      return "int8";
    case DType::uint8:
      return "uint8";
    case DType::int16:
      return "int16";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
    case DType::boolean:
      return "bool";
  }
  return "unknown";
}

}  // namespace lowcomm

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace lowcomm {

// A field of a slot file's bytes.
template <class T>
void put(std::byte* bytes, size_t at, T value) {
  std::memcpy(bytes + at, &value, sizeof(T));
}
template <class T>
T get(const std::byte* bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes + at, sizeof(T));
  return value;
}

// The run and the sizes that a slot file belongs to (SLOT_FILE.md).
struct SlotFileHeader {
  uint64_t elements = 0;  // of a sample
  uint64_t channels = 0;  // the last dimension of its tensor
  uint64_t slot_bytes = 0;
  std::string format;  // SlotFormat::name()
  std::string place;   // boundary, tensor and side
  std::string run;     // the user's name
};

inline constexpr size_t kSlotFileHeaderBytes = 4096;

// ValueError for a run of several lines, or texts that do not fit.
std::array<std::byte, kSlotFileHeaderBytes> bytesOf(const SlotFileHeader& header, const std::string& path);

// The first bytes of a file, as many as it has up to kSlotFileHeaderBytes. ValueError, with path, expected and got, for
// a file that is cut within its header, that is another file, of another machine's byte order or version, or damaged.
SlotFileHeader parseSlotFileHeader(std::span<const std::byte> bytes, const std::string& path);

// ValueError for the first field in which they differ.
void expectSame(const SlotFileHeader& expected, const SlotFileHeader& got, const std::string& path);

}  // namespace lowcomm

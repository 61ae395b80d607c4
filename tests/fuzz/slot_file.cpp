// The header of a slot file, which another program or a damaged disk may have written. The CRC would keep every made-up
// header out, so it is put right first; with an odd number of bytes it is left as it is.
#include "pipeline/slot_file_header.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/hashes.h"
#include "target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lowcomm;
  // A vector of its own: the sanitizer sees a read past its end.
  std::vector<std::byte> bytes(size);
  std::copy_n(reinterpret_cast<const std::byte*>(data), size, bytes.begin());
  if (size % 2 == 0 && size >= kSlotFileHeaderBytes) {
    const uint32_t crc = crc32c(bytes.data(), kSlotFileHeaderBytes - 4);
    std::memcpy(bytes.data() + kSlotFileHeaderBytes - 4, &crc, 4);
  }
  try {
    const SlotFileHeader header = parseSlotFileHeader(bytes, "fuzz");
    const auto again = parseSlotFileHeader(bytesOf(header, "fuzz"), "fuzz");
    expectSame(header, again, "fuzz");
  } catch (const ValueError&) {
  }
  return 0;
}

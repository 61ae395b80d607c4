#include "pipeline/slot_file_header.h"

#include <algorithm>

#include "base/error.h"
#include "base/hashes.h"

namespace lowcomm {
namespace {

constexpr char kMagic[] = "lcslots\n";
constexpr uint32_t kByteOrder = 0x01020304, kVersion = 1, kGroup = 128;
constexpr size_t kTextAt = 48, kMaxText = 3072, kCheckAt = kSlotFileHeaderBytes - 4;

[[noreturn]] void differs(const std::string& path, const std::string& field, const std::string& expected,
                          const std::string& got) {
  throw ValueError("slot file '" + path + "': " + field + ": expected " + expected + ", got " + got);
}

// The value of "field=value\n".
std::string valueOf(const std::string& text, const std::string& field) {
  const std::string lines = "\n" + text;
  const size_t found = lines.find("\n" + field + "=");
  if (found == std::string::npos) return "";
  const size_t at = found + field.size() + 2;
  return lines.substr(at, lines.find('\n', at) - at);
}

}  // namespace

std::array<std::byte, kSlotFileHeaderBytes> bytesOf(const SlotFileHeader& header, const std::string& path) {
  const std::string text = "format=" + header.format + "\nplace=" + header.place + "\nrun=" + header.run + "\n";
  if (text.size() > kMaxText) {
    differs(path, "run", "a name that fits into " + std::to_string(kMaxText) + " bytes with format and place",
            std::to_string(text.size()));
  }
  if (header.run.find('\n') != std::string::npos) differs(path, "run", "one line", "several");
  std::array<std::byte, kSlotFileHeaderBytes> bytes{};
  std::memcpy(bytes.data(), kMagic, 8);
  put(bytes.data(), 8, kByteOrder);
  put(bytes.data(), 12, kVersion);
  put(bytes.data(), 16, header.elements);
  put(bytes.data(), 24, header.channels);
  put(bytes.data(), 32, header.slot_bytes);
  put(bytes.data(), 40, kGroup);
  put(bytes.data(), 44, static_cast<uint32_t>(text.size()));
  std::memcpy(bytes.data() + kTextAt, text.data(), text.size());
  put(bytes.data(), kCheckAt, crc32c(bytes.data(), kCheckAt));
  return bytes;
}

SlotFileHeader parseSlotFileHeader(std::span<const std::byte> bytes, const std::string& path) {
  if (bytes.size() < kSlotFileHeaderBytes) {
    differs(path, "header", std::to_string(kSlotFileHeaderBytes) + " bytes", std::to_string(bytes.size()) + " (cut)");
  }
  const std::byte* data = bytes.data();
  if (std::memcmp(data, kMagic, 8) != 0) differs(path, "kind", "a file of slots", "another file");
  if (get<uint32_t>(data, 8) != kByteOrder) differs(path, "byte order", "this machine's", "another one");
  if (const auto version = get<uint32_t>(data, 12); version != kVersion) {
    differs(path, "version", std::to_string(kVersion), std::to_string(version));
  }
  const uint32_t stated = get<uint32_t>(data, kCheckAt), check = crc32c(data, kCheckAt);
  if (check != stated) {
    differs(path, "header", "CRC " + std::to_string(stated), std::to_string(check) + " (damaged)");
  }
  if (const auto group = get<uint32_t>(data, 40); group != kGroup) {
    differs(path, "slots of a group", std::to_string(kGroup), std::to_string(group));
  }
  const size_t length = std::min<size_t>(get<uint32_t>(data, 44), kMaxText);
  const std::string text(reinterpret_cast<const char*>(data) + kTextAt, length);
  return {get<uint64_t>(data, 16), get<uint64_t>(data, 24), get<uint64_t>(data, 32),
          valueOf(text, "format"), valueOf(text, "place"),  valueOf(text, "run")};
}

void expectSame(const SlotFileHeader& expected, const SlotFileHeader& got, const std::string& path) {
  const auto text = [&](const char* field, const std::string& want, const std::string& found) {
    if (want != found) differs(path, field, "'" + want + "'", "'" + found + "'");
  };
  const auto number = [&](const char* field, uint64_t want, uint64_t found) {
    if (want != found) differs(path, field, std::to_string(want), std::to_string(found));
  };
  text("run", expected.run, got.run);
  text("place", expected.place, got.place);
  number("elements", expected.elements, got.elements);
  number("channels", expected.channels, got.channels);
  text("format", expected.format, got.format);
  number("bytes of a slot", expected.slot_bytes, got.slot_bytes);
}

}  // namespace lowcomm

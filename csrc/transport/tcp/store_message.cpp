#include "transport/tcp/store_message.h"

#include <cstring>

#include "base/cursor.h"
#include "base/error.h"

namespace lowcomm::tcp {

std::vector<std::byte> StoreMessage::bytes() const {
  size_t size = sizeof(uint32_t) * 2 + sizeof(uint64_t) * 2;
  for (const std::string& text : texts)
    size += sizeof(uint64_t) + text.size();
  std::vector<std::byte> bytes(size);
  Writer writer(bytes.data());
  writer.put(static_cast<uint32_t>(kind)).put(static_cast<uint32_t>(texts.size())).put(number).put(wait_ms);
  for (const std::string& text : texts)
    writer.put(static_cast<uint64_t>(text.size())).put(std::as_bytes(std::span(text)));
  return bytes;
}

StoreMessage StoreMessage::parse(std::span<const std::byte> bytes) {
  Cursor cursor(bytes, "store message");
  StoreMessage message;
  message.kind = static_cast<Kind>(cursor.read<uint32_t>("kind"));
  const auto count = cursor.read<uint32_t>("texts");
  message.number = cursor.read<int64_t>("number");
  message.wait_ms = cursor.read<uint64_t>("wait");
  for (uint32_t i = 0; i < count; ++i) {
    const auto text = cursor.take(cursor.read<uint64_t>("bytes of a text"), "text");
    message.texts.emplace_back(reinterpret_cast<const char*>(text.data()), text.size());
  }
  if (cursor.left() > 0)
    throw WireError("store message: expected its end, got " + std::to_string(cursor.left()) + " bytes more");
  return message;
}

}  // namespace lowcomm::tcp

#include "transport/tcp/wire.h"

#include <cstring>
#include <string>

#include "base/cursor.h"
#include "base/error.h"
#include "base/hashes.h"

namespace lowcomm::tcp {
namespace {

constexpr uint64_t kMagic = 0x316d6f63776f6cull << 8 | 0x0a;  // "\nlowcom1"
constexpr uint32_t kVersion = 1;
constexpr uint8_t kUnknown = 1, kCarries = 2, kRelays = 4, kLast = 1;
constexpr uint64_t kIdentityMagic = 0x31736c74776f6cull << 8 | 0x0a;  // "\nlowtls1"
constexpr size_t kSummed = kHelloBytes - sizeof(uint32_t);

template <typename T>
void expect(const char* what, const char* field, T expected, T got) {
  if (expected == got) return;
  throw WireError(std::string(what) + ": " + field + ": expected " + std::to_string(expected) + ", got " +
                  std::to_string(got));
}

void expectAtMost(const char* what, const char* field, uint64_t most, uint64_t got) {
  if (got <= most) return;
  throw WireError(std::string(what) + ": " + field + ": expected at most " + std::to_string(most) + ", got " +
                  std::to_string(got));
}

}  // namespace

void write(const Hello& hello, std::span<std::byte, kHelloBytes> bytes) {
  std::memset(bytes.data(), 0, bytes.size());
  Writer(bytes.data())
      .put(kMagic)
      .put(kVersion)
      .put(hello.group)
      .put(hello.from)
      .put(hello.to)
      .put(hello.channel)
      .put(hello.incarnation)
      .put(hello.received)
      .put(static_cast<uint8_t>((hello.unknown ? kUnknown : 0) | (hello.carries ? kCarries : 0) |
                                (hello.relays ? kRelays : 0)));
  const uint32_t sum = crc32c(bytes.data(), kSummed);
  std::memcpy(bytes.data() + kSummed, &sum, sizeof(sum));
}

Hello parseHello(std::span<const std::byte, kHelloBytes> bytes) {
  constexpr const char* kWhat = "hello";
  Cursor cursor(bytes, kWhat);
  expect(kWhat, "magic", kMagic, cursor.read<uint64_t>("magic"));
  expect(kWhat, "version", kVersion, cursor.read<uint32_t>("version"));
  uint32_t sum;
  std::memcpy(&sum, bytes.data() + kSummed, sizeof(sum));
  expect(kWhat, "checksum", crc32c(bytes.data(), kSummed), sum);
  Hello hello;
  hello.group = cursor.read<GroupId>("group");
  hello.from = cursor.read<uint32_t>("from");
  hello.to = cursor.read<uint32_t>("to");
  hello.channel = cursor.read<uint32_t>("channel");
  hello.incarnation = cursor.read<uint64_t>("incarnation");
  hello.received = cursor.read<uint64_t>("received");
  const auto flags = cursor.read<uint8_t>("flags");
  expectAtMost(kWhat, "flags", kUnknown | kCarries | kRelays, flags);
  hello.unknown = flags & kUnknown;
  hello.carries = flags & kCarries;
  hello.relays = flags & kRelays;
  return hello;
}

void write(const Identity& identity, std::span<std::byte, kIdentityBytes> bytes) {
  std::memset(bytes.data(), 0, bytes.size());
  Writer(bytes.data())
      .put(kIdentityMagic)
      .put(identity.group)
      .put(identity.from)
      .put(identity.to)
      .put(identity.channel)
      .put(identity.incarnation)
      .put(identity.peer_incarnation)
      .put(static_cast<uint32_t>(identity.suite));
}

Identity parseIdentity(std::span<const std::byte> bytes) {
  constexpr const char* kWhat = "PSK identity";
  expect(kWhat, "bytes", kIdentityBytes, bytes.size());
  Cursor cursor(bytes, kWhat);
  expect(kWhat, "magic", kIdentityMagic, cursor.read<uint64_t>("magic"));
  Identity identity;
  identity.group = cursor.read<GroupId>("group");
  identity.from = cursor.read<uint32_t>("from");
  identity.to = cursor.read<uint32_t>("to");
  identity.channel = cursor.read<uint32_t>("channel");
  identity.incarnation = cursor.read<uint64_t>("incarnation");
  identity.peer_incarnation = cursor.read<uint64_t>("peer_incarnation");
  const auto suite = cursor.read<uint32_t>("suite");
  if (suite != 1 && suite != 2) throw WireError("PSK identity: suite: expected 1 or 2, got " + std::to_string(suite));
  identity.suite = static_cast<Identity::Suite>(suite);
  return identity;
}

bool belongs(const Hello& hello, const Identity& identity) {
  return hello.group == identity.group && hello.from == identity.from && hello.to == identity.to &&
         hello.channel == identity.channel && hello.incarnation == identity.incarnation;
}

std::optional<size_t> clientHelloBytes(std::span<const std::byte> begin) {
  constexpr const char* kWhat = "ClientHello";
  constexpr unsigned kHandshake = 22, kMajor = 3, kClientHello = 1;  // RFC 8446, sections 5.1 and 4
  constexpr size_t kRecordHeader = 5, kMessageHeader = 4;
  const auto at = [&](size_t i) { return std::to_integer<unsigned>(begin[i]); };
  if (begin.size() > 0) expect(kWhat, "record", kHandshake, at(0));
  if (begin.size() > 1) expect(kWhat, "version", kMajor, at(1));
  if (begin.size() < kRecordHeader) return {};
  const size_t bytes = kRecordHeader + (at(3) << 8 | at(4));
  expectAtMost(kWhat, "bytes", kMostClientHelloBytes, bytes);
  if (begin.size() > kRecordHeader) expect(kWhat, "message", kClientHello, at(kRecordHeader));
  if (begin.size() >= kRecordHeader + kMessageHeader)
    expect(kWhat, "bytes of the message", bytes, kRecordHeader + kMessageHeader + (at(6) << 16 | at(7) << 8 | at(8)));
  return bytes;
}

void write(const Piece& piece, std::span<std::byte, kPieceHeaderBytes> bytes) {
  std::memset(bytes.data(), 0, bytes.size());
  Writer(bytes.data()).put(piece.bytes).put(static_cast<uint32_t>(piece.last ? kLast : 0)).put(piece.received);
}

Piece parsePiece(std::span<const std::byte, kPieceHeaderBytes> bytes) {
  Cursor cursor(bytes, "piece");
  Piece piece;
  piece.bytes = cursor.read<uint32_t>("bytes");
  expectAtMost("piece", "bytes", kPieceBytes, piece.bytes);
  const auto flags = cursor.read<uint32_t>("flags");
  expectAtMost("piece", "flags", kLast, flags);
  piece.last = flags & kLast;
  piece.received = cursor.read<uint64_t>("received");
  return piece;
}

void write(const Record& record, std::span<std::byte, kRecordHeaderBytes> bytes) {
  std::memset(bytes.data(), 0, bytes.size());
  Writer(bytes.data()).put(static_cast<uint32_t>(record.kind)).put(record.tag).put(record.number).put(record.bytes);
}

Record parseRecord(std::span<const std::byte, kRecordHeaderBytes> bytes) {
  Cursor cursor(bytes, "record");
  Record record;
  const auto kind = cursor.read<uint32_t>("kind");
  expectAtMost("record", "kind", static_cast<uint64_t>(Record::Kind::body), kind);
  record.kind = static_cast<Record::Kind>(kind);
  record.tag = cursor.read<uint32_t>("tag");
  record.number = cursor.read<uint64_t>("number");
  record.bytes = cursor.read<uint64_t>("bytes");
  const bool has_size = record.hasBody() || record.kind == Record::Kind::offered;
  expectAtMost("record", "bytes", has_size ? kMostMessageBytes : 0, record.bytes);
  return record;
}

}  // namespace lowcomm::tcp

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace lowcomm::tcp {

// The bytes between endpoints over TCP, all numbers little-endian (FORMAT.md: TCP). A connection begins with a
// Hello each way. Then it carries pieces: a header and up to kPieceBytes of a channel's stream. The stream is a
// sequence of records, which outlives its connections.

using GroupId = std::array<std::byte, 16>;

// An end of a connection introduces itself, and says from which byte of the channel's stream it is to go on.
struct Hello {
  GroupId group{};
  uint32_t from = 0, to = 0;  // ranks of the group
  uint32_t channel = 0;
  uint64_t incarnation = 0;  // of the process: one that was started again knows nothing of the stream
  uint64_t received = 0;     // bytes of the stream to this end
  bool unknown = false;      // an answer: there is no such group here (any more)
  bool relays = false;       // to a relay: join this connection with that of `to`; its answer: it is joined
  bool carries = false;      // this connection is to carry the channel; without, its maker only asks who is there
};

inline constexpr size_t kHelloBytes = 64;

void write(const Hello& hello, std::span<std::byte, kHelloBytes> bytes);

// A request to a relay is a Hello and so many bytes more: a code of the Hello that only those who have the secret can
// make (Tls::relayCode), or zeros without a secret.
inline constexpr size_t kRelayCodeBytes = 32;
using RelayCode = std::array<std::byte, kRelayCodeBytes>;

// Throws WireError naming the field: magic, version, checksum.
Hello parseHello(std::span<const std::byte, kHelloBytes> bytes);

// Where ranks share a secret, Hello and pieces travel inside TLS. What anybody can read before that is the PSK identity
// of the ClientHello: it names the key of this one connection, which is made of the secret and of these bytes.
struct Identity {
  enum class Suite : uint8_t { aes_256_gcm = 1, chacha20_poly1305 = 2 };
  GroupId group{};
  uint32_t from = 0, to = 0;  // ranks of the group: of the dialling end, of the accepting one
  uint32_t channel = 0;
  uint64_t incarnation = 0, peer_incarnation = 0;  // of the processes of both ends, in the same order
  Suite suite = Suite::aes_256_gcm;                // the dialling end's choice
};

inline constexpr size_t kIdentityBytes = 56;

void write(const Identity& identity, std::span<std::byte, kIdentityBytes> bytes);
Identity parseIdentity(std::span<const std::byte> bytes);  // throws WireError

// Whether the Hello is what the end that dials with this identity says.
bool belongs(const Hello& hello, const Identity& identity);

// How many bytes the ClientHello takes that begins with these, its record's header included; nothing where that cannot
// be told yet. WireError for what no ClientHello begins with that this version sends: those are one record of at most
// kMostClientHelloBytes, so nothing larger is waited for.
inline constexpr size_t kMostClientHelloBytes = 1024;
std::optional<size_t> clientHelloBytes(std::span<const std::byte> begin);

struct Piece {
  uint32_t bytes = 0;     // of the stream, that follow
  bool last = false;      // the channel's end: nobody dials again
  uint64_t received = 0;  // bytes of the stream the other way
};

inline constexpr size_t kPieceHeaderBytes = 16, kShortPieceBytes = 64 * 1024, kPieceBytes = 8 * kShortPieceBytes;

void write(const Piece& piece, std::span<std::byte, kPieceHeaderBytes> bytes);
Piece parsePiece(std::span<const std::byte, kPieceHeaderBytes> bytes);  // throws WireError

// A notice about a message: that it follows; that it was delivered, which means copied to where its receiver wants it;
// or, if its receiver may lack room, that it is offered, that it is wanted, that its body follows. Each message is
// reported delivered exactly once.
struct Record {
  enum class Kind : uint8_t { message, delivered, offered, wanted, body };
  Kind kind = Kind::message;
  uint32_t tag = 0;     // of a message that follows or is offered
  uint64_t number = 0;  // of the message among those of its channel and direction, from 0
  uint64_t bytes = 0;   // of a message that follows or is offered, and of a body

  // Whether so many bytes of the stream belong to it.
  bool hasBody() const { return kind == Kind::message || kind == Kind::body; }
};

inline constexpr size_t kRecordHeaderBytes = 24;
inline constexpr uint64_t kMostMessageBytes = uint64_t{64} << 20;

// So many bytes of messages whose receives may not be posted go unasked over a channel; more are offered. Each message
// counts for kMessageCost bytes more than it has, which is what remembering it takes.
inline constexpr uint64_t kUnaskedBytes = uint64_t{4} << 20, kMessageCost = 64;

void write(const Record& record, std::span<std::byte, kRecordHeaderBytes> bytes);
Record parseRecord(std::span<const std::byte, kRecordHeaderBytes> bytes);  // throws WireError

}  // namespace lowcomm::tcp

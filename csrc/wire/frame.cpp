#include "wire/frame.h"

#include <bit>
#include <cstring>

#include "base/cursor.h"
#include "base/error.h"
#include "base/hashes.h"
#include "codec/codec.h"

namespace lowcomm {

static_assert(std::endian::native == std::endian::little, "headers are little-endian and are copied as they stand");

namespace {

constexpr uint32_t kMagic = 0x464d434cu;  // "LCMF"
constexpr size_t kCrcOffset = 60;

template <typename Error>
[[noreturn]] void fail(const char* field, const std::string& expected, const std::string& got) {
  throw Error(std::string("frame: ") + field + ": expected " + expected + ", got " + got);
}

std::string text(uint64_t value) {
  return std::to_string(value);
}

// The rules of every header, whatever the op: one list for the writer's mistakes and the reader's refusals.
template <typename Error>
void checkFields(const FrameHeader& h) {
  if (h.version != kWireVersion) fail<Error>("version", text(kWireVersion), text(h.version));
  if (h.kind > FrameKind::hello) fail<Error>("kind", "0...3", text(static_cast<uint8_t>(h.kind)));
  const GridFamily* grid = gridFamily(h.codec);
  if (!grid && !plainFamily(h.codec) && h.codec != CodecId::none && h.codec != CodecId::layout) {
    fail<Error>("codec", "a number of this version's codecs (" + codecNames() + ")",
                text(static_cast<uint8_t>(h.codec)));
  }
  if (grid ? !isGridBits(*grid, h.bits) : h.bits != 0) {
    fail<Error>("bits", grid ? gridBits(*grid) : "0 for this codec", text(h.bits));
  }
  // Flags that no codec has belong to later versions.
  if (grid ? !isGridFlags(*grid, h.flags) : h.flags != 0) {
    std::string optional;
    if (grid && grid->channels()) optional += " or " + text(kChannelFlag) + " more";
    if (grid && grid->bf16()) optional += " or " + text(kBf16Flag) + " more";
    if (grid && grid->l2) optional += " or " + text(kL2Flag) + " more";
    if (grid && grid->id != CodecId::levels) optional += " or " + text(kUnitFlag) + " more";
    if (grid && grid->rotation == Rotation::option) optional += " or " + text(kRotatedFlag) + " more";
    const int always =
        grid ? static_cast<int>(grid->rounding) | (grid->rotation == Rotation::always ? kRotatedFlag : 0) : 0;
    fail<Error>("flags", text(static_cast<uint64_t>(always)) + optional + " for this codec", text(h.flags));
  }
  if (itemBytes(h.dtype) == 0) fail<Error>("dtype", "0...10", text(static_cast<uint8_t>(h.dtype)));
  const bool channel = (h.flags & kChannelFlag) != 0, rotated = (h.flags & kRotatedFlag) != 0;
  const bool chunked = h.codec == CodecId::topk && isGridBucket(h.bucket);
  if (!grid && !chunked && h.bucket != 0) {
    const bool topk = h.codec == CodecId::topk;
    fail<Error>("bucket", topk ? std::string(gridBuckets(false)) + " or 0" : "0 for this codec", text(h.bucket));
  }
  if (channel && !isGridChannels(h.bucket)) fail<Error>("bucket", kGridChannels, text(h.bucket));
  const bool sized = rotated || (h.flags & kUnitFlag) != 0;
  if (grid && !channel && !isGridBucket(h.bucket, rotated) && (sized || h.bucket != kTensorBucket)) {
    fail<Error>("bucket", std::string(gridBuckets(rotated)) + (sized ? "" : " or 0"), text(h.bucket));
  }
}

// The CRC of the header without its own field, continued over the payload.
uint32_t frameCrc(std::span<const std::byte> frame) {
  const uint32_t header = crc32c(frame.data(), kCrcOffset);
  return crc32c(frame.data() + kFrameHeaderBytes, frame.size() - kFrameHeaderBytes, header);
}

}  // namespace

void sealFrame(std::span<std::byte> frame, const FrameHeader& header) {
  if (frame.size() != kFrameHeaderBytes + size_t{header.payload_bytes}) {
    fail<ValueError>("size", text(kFrameHeaderBytes + size_t{header.payload_bytes}), text(frame.size()));
  }
  checkFields<ValueError>(header);
  Writer out(frame.data());
  out.put(kMagic);
  out.put(header.version);
  out.put(header.kind);
  out.put(header.codec);
  out.put(header.bits);
  out.put(header.flags);
  out.put(header.dtype);
  out.put(uint16_t{0});
  out.put(header.bucket);
  out.put(header.elements);
  out.put(header.first);
  out.put(header.sequence);
  out.put(header.epoch);
  out.put(header.channel);
  out.put(header.state_version);
  out.put(header.key_hash);
  out.put(header.payload_bytes);
  out.put(frameCrc(frame));
}

size_t sealText(std::byte* frame, FrameHeader header, const std::string& text) {
  header.payload_bytes = static_cast<uint32_t>(text.size());
  std::memcpy(frame + kFrameHeaderBytes, text.data(), text.size());
  const size_t bytes = kFrameHeaderBytes + text.size();
  sealFrame({frame, bytes}, header);
  return bytes;
}

FrameHeader openFrame(std::span<const std::byte> received) {
  Cursor in(received, "frame");
  const auto magic = in.read<uint32_t>("magic");
  if (magic != kMagic) fail<WireError>("magic", text(kMagic) + " ('LCMF')", text(magic));
  FrameHeader h;
  h.version = in.read<uint8_t>("version");
  // Before anything else is believed: another version may have put it elsewhere.
  if (h.version != kWireVersion) fail<WireError>("version", text(kWireVersion), text(h.version));
  h.kind = static_cast<FrameKind>(in.read<uint8_t>("kind"));
  h.codec = static_cast<CodecId>(in.read<uint8_t>("codec"));
  h.bits = in.read<uint8_t>("bits");
  h.flags = in.read<uint8_t>("flags");
  h.dtype = static_cast<DType>(in.read<uint8_t>("dtype"));
  const auto reserved = in.read<uint16_t>("reserved");
  h.bucket = in.read<uint32_t>("bucket");
  h.elements = in.read<uint64_t>("elements");
  h.first = in.read<uint64_t>("first");
  h.sequence = in.read<uint32_t>("sequence");
  h.epoch = in.read<uint32_t>("epoch");
  h.channel = in.read<uint32_t>("channel");
  h.state_version = in.read<uint32_t>("state_version");
  h.key_hash = in.read<uint64_t>("key_hash");
  h.payload_bytes = in.read<uint32_t>("payload_bytes");
  const auto crc = in.read<uint32_t>("crc32c");
  if (h.payload_bytes > received.size() - kFrameHeaderBytes) {
    fail<WireError>("payload_bytes", "at most " + text(received.size() - kFrameHeaderBytes), text(h.payload_bytes));
  }
  // Before the fields are looked at: those of a damaged frame would accuse the wrong thing.
  const uint32_t computed = frameCrc(received.first(kFrameHeaderBytes + h.payload_bytes));
  if (crc != computed) fail<WireError>("crc32c", text(computed), text(crc));
  if (reserved != 0) fail<WireError>("reserved", "0", text(reserved));
  checkFields<WireError>(h);
  return h;
}

std::span<const std::byte> framePayload(std::span<const std::byte> received, const FrameHeader& header) {
  if (received.size() < kFrameHeaderBytes + size_t{header.payload_bytes}) {
    fail<WireError>("size", "at least " + text(kFrameHeaderBytes + size_t{header.payload_bytes}),
                    text(received.size()));
  }
  return received.subspan(kFrameHeaderBytes, header.payload_bytes);
}

void expectFrame(const FrameHeader& got, const FrameHeader& want) {
  const auto same = [](const char* field, auto g, auto w) {
    if (g != w) fail<WireError>(field, text(static_cast<uint64_t>(w)), text(static_cast<uint64_t>(g)));
  };
  // Where a frame belongs before what is in it: a stale frame differs in much, and its epoch is the reason.
  same("version", got.version, want.version);
  same("epoch", got.epoch, want.epoch);
  same("sequence", got.sequence, want.sequence);
  same("kind", got.kind, want.kind);
  same("channel", got.channel, want.channel);
  same("key_hash", got.key_hash, want.key_hash);
  same("state_version", got.state_version, want.state_version);
  same("codec", got.codec, want.codec);
  same("bits", got.bits, want.bits);
  same("flags", got.flags, want.flags);
  same("dtype", got.dtype, want.dtype);
  same("bucket", got.bucket, want.bucket);
  same("elements", got.elements, want.elements);
  same("first", got.first, want.first);
  same("payload_bytes", got.payload_bytes, want.payload_bytes);
}

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "base/dtype.h"
#include "codec/spec.h"

namespace lowcomm {

class LevelTable;
struct KernelTable;

// The key of a stochastic codec's random numbers: they are a function of it and of the element's index alone.
// stream = phase·2^30 + rank·2^16 + slot mod 2^16; what a slot has above 2^16 goes into the seed (FORMAT.md,
// "Randomness").
struct Draws {
  uint64_t seed = 0;
  uint32_t stream = 0;
  uint32_t step = 0;

  // The draws of the tensor `n` slots on: slots have 64 bits.
  Draws slot(uint64_t n) const {
    const uint64_t slot = (stream & 0xffffu) + n;
    return {seed + (slot >> 16) * kSlotsFurther, (stream & ~0xffffu) | static_cast<uint32_t>(slot & 0xffffu), step};
  }

  // Those of the re-encoding of a sum, phase 1.
  Draws again() const { return {seed, stream | 1u << 30, step}; }

  static constexpr uint64_t kSlotsFurther = 0x9e3779b97f4a7c15ull;  // added to the seed for each 2^16 slots
};

// The stream of a rank's first encode of the tensor with number `slot` within the step; slots from 2^16 up are reached
// by Draws::slot() alone.
constexpr uint32_t streamOf(int rank, uint32_t slot) {
  if (slot >= 1u << 16) throw std::logic_error("streamOf: expected a slot below 65536, got " + std::to_string(slot));
  return (static_cast<uint32_t>(rank) & 0x3fffu) << 16 | slot;
}

// Elements that are made as they are encoded, so that no tensor ever holds them: given the number of a piece's first
// element in the run and their count, the elements, valid until the next call, and what the pieces after it will be
// made of: an address that GridForm::soon takes.
struct Piece {
  const float* x;
  const void* soon;
};
using MakePiece = std::function<Piece(uint64_t at, uint64_t count)>;

// Turns a contiguous run of a flattened tensor into payload bytes and back. Stateless, thread-safe, deterministic.
//
// A run is [first, first + count) of the whole tensor; `first` is a multiple of granularity(), so bucket and block
// numbers (and with them the random draws) are those of the whole tensor however it is cut. Codecs whose every code
// depends on all elements take the whole tensor only (kUncut): of their payload, bytes are cut (collective/plan.h). The
// caller allocates: dst/src of encodedBytes(count, dtype) bytes exactly; fewer or more is a ValueError (encode) or a
// WireError (decode: the bytes came from a peer). A payload may lie at any address; elements have their type's
// alignment.
class Codec {
 public:
  // The granularity of codecs that cannot be cut: 0 is its only multiple that is an element's number.
  static constexpr uint64_t kUncut = UINT64_MAX;

  // Throws ValueError where misfit(spec), before a codec makes anything of it.
  explicit Codec(const CodecSpec& spec);
  virtual ~Codec() = default;

  const CodecSpec& spec() const { return spec_; }

  // A tensor may be cut only at multiples of this many elements; kUncut: not at all.
  virtual uint64_t granularity() const = 0;

  // Whether encode and decode take this element type (none: all; others: float32, float16, bfloat16).
  virtual bool supports(DType dtype) const = 0;

  // Exact payload size of `count` elements; 0 for 0. ValueError where no tensor of the codec has so many: with
  // axis=channel a count that is no multiple of C.
  virtual size_t encodedBytes(uint64_t count, DType dtype) const = 0;

  // Where a run's payload is that of its pieces (codec/pieces.h), cut at multiples of granularity(): the bytes of
  // metadata that it begins with, without their padding to a multiple of 64; the pieces' are joined end to end, and so
  // is what follows the padding. Nothing where a payload cannot be put together so.
  virtual std::optional<size_t> headBytes(uint64_t /*count*/, DType /*dtype*/) const { return std::nullopt; }

  // Throws NonFiniteError under nonfinite=error (nothing useful is then in dst), TypeError.
  virtual void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                      const Draws& draws) const = 0;

  // encode() for float32 elements that `make` makes, piece by piece and in order; a piece may be requested twice, after
  // which the pieces behind it are requested again.
  virtual void encodeMade(std::span<std::byte> dst, const MakePiece& make, uint64_t first, uint64_t count,
                          const Draws& draws) const;

  // Throws WireError when a bit that must be 0 is not, or the size is wrong; dst is then unspecified.
  virtual void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const = 0;

  // acc[i] += decoded[i] in fp32; dtype is that of the payload's elements. Throws as decode, and TypeError from none:
  // exact elements are reduced in their own type (NoneCodec::elements, kernels/reduce.h).
  virtual void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                         uint64_t count) const = 0;

  // For elements that stay with their owner and are not encoded, so that they too obey the codec's nonfinite=: throws
  // the NonFiniteError that encode would, `of` ending its message. Codecs that take every element throw nothing.
  virtual void expectTaken(const void*, DType, uint64_t /*first*/, uint64_t /*count*/,
                           const std::string& /*of*/) const {}

  // This codec with `table`'s levels, a copy of them. Without one a codec that needsTable throws ValueError from encode
  // and decode. Throws ValueError where the codec takes none, or one of another number of levels.
  virtual std::shared_ptr<const Codec> with(const LevelTable& table) const;

  // The state_version of this codec's frames: its table's version, 0 without a table. A receiver whose version
  // differs refuses the frame by that field.
  virtual uint32_t stateVersion() const { return 0; }

 private:
  CodecSpec spec_;
};

// The registry: one line a codec in codec.cpp. Throws ValueError for CodecId::layout.
std::shared_ptr<const Codec> makeCodec(const CodecSpec& spec);

// The same on other loops than this process's: for tests, which compare the forms. `table` outlives the codec.
std::shared_ptr<const Codec> makeCodec(const CodecSpec& spec, const KernelTable& table);

// Codec names this build knows, comma-separated with their bit ranges, for messages and `info`.
std::string codecNames();

}  // namespace lowcomm

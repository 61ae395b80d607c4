#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "codec/change.h"
#include "codec/codec.h"

namespace lowcomm {

// One contribution to a sum: a payload from a peer, or this rank's own elements where `own` is not null.
struct Contribution {
  std::span<const std::byte> payload;
  const void* own = nullptr;
  DType own_type = DType::opaque;  // of the own elements; opaque: that of the result
};

// Whether all that the codec encodes is finite, and so is what it decodes to.
bool staysFinite(const CodecSpec& codec);

// A codec together with the arithmetic around it, piece by piece in the cache: what takes encode, decode and passes
// over whole tensors otherwise, and no tensor is copied. Every result has the bits of those passes, made in fp32, each
// operation rounded; a state in a 16-bit type is widened, and rounded once when it is written.
//
// A failed call of encodeFeedback leaves the state as it was: it is written only when the last element has been
// encoded, and is read a second time for it. In calls of a chunk (up to some 64 K elements) that is from the cache.
//
// No state ever holds a NaN or an infinity that came with the elements: where the codec takes them (nonfinite=poison),
// a memory keeps its value there and a residual becomes 0, or one bad step would spoil all later ones. Nor one that its
// own type makes: a number beyond the largest of a 16-bit type is held to it.
//
// A codec whose payload cannot be put together of pieces (Codec::headBytes) is used on all elements at once: the same
// result, at the price of passes over memory. `none` is refused: it loses nothing, and there would be no state.
//
// Holds memory that calls reuse; one thread at a time. dst (of encodedBytes(count, float32) bytes), first, count and
// draws are those of Codec::encode. Throws what encode and decode throw, and TypeError for `none` and for other element
// types than those three.
class FusedCodec {
 public:
  explicit FusedCodec(std::shared_ptr<const Codec> codec);

  const Codec& codec() const { return *codec_; }

  // The change of x against what the receiver knows of it: dst = encode(x - m), then m += decode(dst), which the
  // receiver does too (AQ-SGD: Wang et al., Fine-tuning Language Models over Slow Networks; NeurIPS 2022). A failed
  // call leaves m without meaning, part old and part new: who needs the old one gives the new one a place of its own.
  void encodeDelta(std::span<std::byte> dst, Elements x, State m, uint64_t first, uint64_t count, const Draws& draws) {
    encodeDelta(dst, x, {m.data, m.dtype}, m, first, count, draws);
  }

  // encodeDelta() with a place of its own for the memory's next value: `before` stays unchanged, in a failed call too.
  // Both have one type.
  void encodeDelta(std::span<std::byte> dst, Elements x, Elements before, State after, uint64_t first, uint64_t count,
                   const Draws& draws);

  // The receiver's side of encodeDelta: y = before + decode(src), rounded once to y's type, and after = the same sum in
  // the memory's type, the bits that the sender's memory has. `after` may be `before`'s place. Throws WireError for a
  // payload that does not decode: y and after are then unspecified.
  void decodeDelta(std::span<const std::byte> src, State y, Elements before, State after, uint64_t first,
                   uint64_t count);

  // Error feedback: y = g + e, dst = encode(y), e = y - decode(dst) (Seide et al., 1-Bit Stochastic Gradient Descent;
  // Interspeech 2014).
  void encodeFeedback(std::span<std::byte> dst, Elements g, State e, uint64_t first, uint64_t count,
                      const Draws& draws);

  // The owner of a slice sums all ranks' contributions: their sum in fp32 in the order given, which is that of the
  // ranks, divided once by average_over if that is not 0; dst = encode(sum); out = decode(dst) in `dtype`, the bits
  // that every decoder of dst gets. Out may be an own contribution of that type. Throws ValueError without
  // contributions, WireError for an invalid payload; dst and out are then unspecified. `lost`, unless null, receives
  // what the encoding, and the rounding to `dtype`, lost of the undivided sum, (sum - out) times the divisor: `count`
  // fp32 elements, 0 where that is not finite.
  void encodeSum(std::span<std::byte> dst, void* out, DType dtype, std::span<const Contribution> contributions,
                 int average_over, uint64_t first, uint64_t count, const Draws& draws, float* lost = nullptr);

 private:
  void check(std::initializer_list<DType> dtypes, size_t bytes, uint64_t count) const;
  void checkPayload(std::span<const std::byte> payload, uint64_t count) const;
  void checkMemory(Elements before, State after) const;
  bool encodeInOnePass(std::span<std::byte> dst, Elements x, Elements before, State after, uint64_t first,
                       uint64_t count, const Draws& draws);
  bool decodeInOnePass(std::span<const std::byte> src, State y, Elements before, State after, uint64_t first,
                       uint64_t count);
  void advance(std::span<const std::byte> payload, std::optional<State> y, Elements before, State after, uint64_t first,
               uint64_t count);
  float* room(std::vector<float>& memory, uint64_t count);
  const float* widened(Elements x, uint64_t at, uint64_t count, std::vector<float>& memory);
  void write(State to, const float* x, uint64_t at, uint64_t count);
  void keep(State to, float* x, uint64_t at, uint64_t count);

  std::shared_ptr<const Codec> codec_;
  const ChangeCodec* changes_;  // the same codec, where it has loops for deltas that keep all finite; else null
  std::vector<float> work_, other_, decoded_;
  std::vector<std::byte> payload_;
};

}  // namespace lowcomm

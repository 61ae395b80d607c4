#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "codec/spec.h"
#include "kernels/dtype.h"

namespace lowcomm {

// What a stochastic codec's random numbers are a function of, beside the element's index: nothing else enters.
// stream = phase·2^30 + rank·2^16 + slot (FORMAT.md, "Randomness").
struct Draws {
  uint64_t seed = 0;
  uint32_t stream = 0;
  uint32_t step = 0;

  // The draws of the tensor `n` slots on; slots wrap within their 16 bits and never reach the rank's.
  Draws slot(uint32_t n) const { return {seed, (stream & ~0xffffu) | ((stream + n) & 0xffffu), step}; }
};

// The stream of a rank's first encode of the tensor with number `slot` within the step.
constexpr uint32_t streamOf(int rank, uint32_t slot) {
  return (static_cast<uint32_t>(rank) & 0x3fffu) << 16 | (slot & 0xffffu);
}

// Turns a contiguous run of a flattened tensor into payload bytes and back. Stateless, thread-safe, deterministic.
//
// A run is [first, first + count) of the whole tensor; `first` is a multiple of granularity(), so bucket and block
// numbers (and with them the random draws) are those of the whole tensor however it is cut. The caller allocates:
// dst/src of encodedBytes(count, dtype) bytes exactly; fewer or more is a ValueError (encode) or a WireError (decode:
// the bytes came from a peer).
class Codec {
 public:
  explicit Codec(CodecSpec spec) : spec_(spec) {}
  virtual ~Codec() = default;

  const CodecSpec& spec() const { return spec_; }

  // A tensor may be cut only at multiples of this many elements.
  virtual uint64_t granularity() const = 0;

  // Whether encode and decode take this element type (grid codecs: float32, float16, bfloat16; none: all).
  virtual bool supports(DType dtype) const = 0;

  // Exact payload size of `count` elements; 0 for 0.
  virtual size_t encodedBytes(uint64_t count, DType dtype) const = 0;

  // Where a run's payload is that of its pieces (codec/pieces.h), cut at multiples of granularity(): the bytes of
  // metadata that it begins with, without their padding to a multiple of 64; the pieces' are joined end to end, and so
  // is what follows the padding. Nothing where a payload cannot be put together so.
  virtual std::optional<size_t> headBytes(uint64_t /*count*/, DType /*dtype*/) const { return std::nullopt; }

  // Throws NonFiniteError under nonfinite=error (nothing useful is then in dst), TypeError.
  virtual void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                      const Draws& draws) const = 0;

  // Throws WireError when a bit that must be 0 is not, or the size is wrong; dst is then unspecified.
  virtual void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const = 0;

  // acc[i] += decoded[i] in fp32; dtype is that of the payload's elements. Throws as decode, and TypeError from none:
  // exact elements are reduced in their own type (NoneCodec::elements, kernels/reduce.h).
  virtual void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                         uint64_t count) const = 0;

 private:
  CodecSpec spec_;
};

// The registry: one line a codec in codec.cpp. Throws ValueError for CodecId::layout.
std::shared_ptr<const Codec> makeCodec(const CodecSpec& spec);

// Codec names this build knows, comma-separated with their bit ranges, for messages and `info`.
std::string codecNames();

}  // namespace lowcomm

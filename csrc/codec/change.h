#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/dtype.h"
#include "codec/codec.h"

namespace lowcomm {

// Elements that are read, and elements that are read and written: float32, float16 or bfloat16.
struct Elements {
  const void* data;
  DType dtype;
};
struct State {
  void* data;
  DType dtype;
};

// The elements that lie `at` further on.
Elements further(Elements x, uint64_t at);
State further(State x, uint64_t at);

// `count` elements as floats: where they stand, or in `memory`, which has room for them.
const float* widened(const KernelTable& table, Elements x, uint64_t count, float* memory);

// Writes floats to a state, rounded once to its type, and held to what a state of that type can go on from. x is
// scratch afterwards.
void keep(const KernelTable& table, State to, float* x, uint64_t count);

// Asks for elements that will be read once what is in the cache has been computed with: loops in the cache give a
// processor nothing to foresee.
void fetch(Elements x, uint64_t count);

// One run's change against a memory, encoded as the memory is brought up to date: piece by piece from the first element
// to the last, each of piece() elements or any multiple of them, the last one of what is left.
inline constexpr uint64_t kChangePiece = 4096;  // and the largest bucket that a delta's step holds

// Made for one payload, to encode it or to decode it; used under FloatEnv.
class Change {
 public:
  virtual ~Change() = default;

  virtual uint64_t piece() const { return kChangePiece; }

  // Encodes x - before, and after = before + what that decodes to; `after` may be `before`. False when an element is
  // refused: of this piece `after` is then without meaning, and in place Codec::encode would refuse the same elements
  // of x - after.
  virtual bool encode(const float* x, Elements before, State after, uint64_t count) = 0;

  // y = before + decoded; after = the same sum in the memory's type.
  virtual void decode(float* y, Elements before, State after, uint64_t count) = 0;
};

// A codec with loops of its own for that, where others make deltas of encodeMade and decodeAdd: the same bytes and
// values.
class ChangeCodec {
 public:
  virtual ~ChangeCodec() = default;

  // Arguments, checks and errors of Codec::encode and Codec::decode; float32. Null where these options have no such
  // loops. dst and src outlive what is made.
  virtual std::unique_ptr<Change> changeEncoder(std::span<std::byte> dst, uint64_t first, uint64_t count,
                                                const Draws& draws) const = 0;
  virtual std::unique_ptr<Change> changeDecoder(std::span<const std::byte> src, uint64_t first,
                                                uint64_t count) const = 0;
};

}  // namespace lowcomm

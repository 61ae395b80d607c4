#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "codec/grid.h"

namespace lowcomm {

// A run's deltas under a grid codec, from its first element to its last: x - m is encoded, and m becomes m + what that
// decodes to, a piece in the first-level cache at a time. All elements are float32; used under FloatEnv. `codec` and
// `payload` outlive it.
class GridDelta {
 public:
  // `payload`: of `count` elements. An encoder writes to it, a decoder only reads.
  GridDelta(const GridCodec& codec, std::byte* payload, uint64_t first, uint64_t count, const Draws& draws);

  // The next n elements, a multiple of the codec's granularity unless they are the last ones; `after` may be m. False
  // when an element is refused: `after` is then without meaning from there on, but in place m is as it was.
  bool encode(const float* x, const float* m, float* after, uint64_t n);

  // y = after = m + decoded; they may be one place.
  void decode(float* y, float* after, const float* m, uint64_t n);

 private:
  size_t metaAt() const { return codec_.metaBytes(at_); }
  size_t wordsAt() const { return head_ + codec_.wordBytes(at_); }
  uint64_t step() const;
  float* room(std::unique_ptr<float[]>& memory) const;
  bool encodeStep(const float* x, const float* m, float* after, uint64_t n);
  void addStep(float* after, const float* m, uint64_t n);

  const GridCodec& codec_;
  GridForm form_;
  std::byte* const payload_;  // which a decoder does not write to
  const size_t head_;
  const uint64_t first_;
  const PhiloxKey key_;
  CodebookLoops::Change change_ = nullptr;  // both null where the codec has no loops for it
  CodebookLoops::Advance advance_ = nullptr;
  uint64_t at_ = 0;  // elements that are done
  std::unique_ptr<float[]> change_of_, rotated_;
};

}  // namespace lowcomm

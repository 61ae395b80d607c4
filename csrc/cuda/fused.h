#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "cuda/device.h"
#include "cuda/grid.h"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// A grid codec together with the arithmetic around it, for tensors that lie on a CUDA device: the bytes and values of
// FusedCodec (codec/fused.h), one kernel a call. The grid codecs are those of grid.h; those that encode take none that
// is rotated or has a codebook. For pointers, `refused` and what is thrown see grid.h. A tensor comes from the device's
// memory once and a payload goes there once; what is needed again after the codes are known comes from a cache.
//
// Executed by the tests' simulator only so far.

// The state that one side keeps from call to call: float32, float16 or bfloat16, aligned to its type.
//
// `after` is `before`, or apart from all else. On a device no call can be taken back: buckets are written while others
// are still to be looked at. So a bucket that is refused is not written to `after`, and others are. A caller that
// needs the state as it was when `refused` is 1 gives another `after` and exchanges the two once the word is 0.
struct FusedState {
  const void* before = nullptr;
  void* after = nullptr;
  DType dtype = DType::float32;
};

// The change of x against what the receiver knows of it: payload = encode(x - m), m.after = m.before + decode(payload).
// Under nonfinite=saturate and poison a memory keeps its value where that sum is not finite. `block` and `key` are
// encodeGrid's; what is refused, too. run.dtype is x's.
void encodeDelta(const Place& place, const GridRun& run, void* payload, const void* x, const FusedState& m,
                 uint64_t block, const PhiloxKey& key, uint32_t* refused);

// The receiver's side of encodeDelta: y = m.before + decode(payload), rounded once to run.dtype, and m.after = the same
// sum in m's type, the bits that the sender's memory has. Codecs are all of grid.h, `levels`, `gauss` and rotated ones
// too. Refuses what decodeGrid does; y and m.after are then without meaning.
void decodeDelta(const Place& place, const GridRun& run, void* y, const void* payload, const FusedState& m,
                 uint32_t* refused);

// Error feedback: y = g + e.before, payload = encode(y), e.after = y - decode(payload). Under saturate and poison a
// residual that is not finite becomes 0. run.dtype is g's.
void encodeFeedback(const Place& place, const GridRun& run, void* payload, const void* g, const FusedState& e,
                    uint64_t block, const PhiloxKey& key, uint32_t* refused);

// One contribution to a sum: a payload of the same run, aligned to 16, or elements of run.dtype where `own` is not
// null.
struct FusedTerm {
  const void* payload = nullptr;
  const void* own = nullptr;
};
inline constexpr size_t kMostTerms = 64;

// The sum of 1 to kMostTerms contributions in float32, in the order given, divided once by average_over where that is
// not 0; payload = encode(sum), out = decode(payload) in run.dtype. out may be an own contribution. Refuses what
// decodeGrid does of the contributions and encodeGrid of their sum; payload and out are then without meaning.
// `terms` are read before the call returns.
void encodeSum(const Place& place, const GridRun& run, void* payload, void* out, std::span<const FusedTerm> terms,
               uint32_t average_over, uint64_t block, const PhiloxKey& key, uint32_t* refused);

}  // namespace lowcomm::cuda

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "codec/level_table.h"
#include "codec/spec.h"
#include "cuda/device.h"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// The grid codecs, all of them and with all their options but bucket=tensor and axis=channel, for tensors that lie on a
// CUDA device: the bytes and values of GridCodec (codec/grid.h), made where the tensor is. FORMAT.md, "Grid
// codecs".
//
// Compiled in builds that have nvcc, for sm_80 and sm_90 unless CUDAARCHS names others (CMake: LOWCOMM_CUDA). So far
// these kernels were executed by the tests' simulator of CUDA threads only, never on a GPU; no speed is claimed. Memory
// order between warps, the conversions to and from 16-bit elements by instruction, streams and real devices wait for
// one.

// A run of a tensor, cut where a codec may cut (at multiples of max(512, bucket) elements).
struct GridRun {
  CodecSpec codec;
  DType dtype = DType::float32;  // of the elements: float32, float16, bfloat16
  uint64_t count = 0;            // elements; above 2^31 too. 0: nothing is enqueued

  // The table of levels<b>; null for other codecs. Read before the call returns; a launch has a copy of its own.
  const LevelTable* levels = nullptr;
};

// All three calls have this in common.
//
// Pointers are to memory that `place.device` can reach, and stay the caller's: valid until the stream has passed the
// call. `payload` is the whole payload of the run, GridCodec::encodedBytes(count, dtype) bytes, aligned to 16. Elements
// need the alignment of their type; 16 bytes (float16, bfloat16: 8) is what makes loads and stores wide.
//
// `refused` is one word that the caller has set to 0 (on the same stream) and reads once the stream has passed: it is
// made 1 where the host's codec would have thrown, and never made 0. A copy of the elements, or of the payload, given
// to GridCodec then throws the error with its position. May be shared by several calls.
//
// Throw ValueError or TypeError for a run that is no grid codec's or a misaligned payload, CudaError with CUDA's own
// text where the runtime refuses the launch; nothing is enqueued then. Faults inside a kernel show, as always with
// CUDA, at a later call. Thread-safe: no state. Capturable in a CUDA graph: only kernels are enqueued, one a call.

// Payload of the elements x. `block` is the number in the whole tensor of the run's first block of 512. Refuses, the
// payload being then without meaning, a bucket whose range is above what `delta` spans and, under nonfinite=error, a
// NaN, an infinity, a magnitude of finiteLimit(codec) and more; under saturate and poison these are sent as GridCodec
// does.
void encodeGrid(const Place& place, const GridRun& run, void* payload, const void* x, uint64_t block,
                const PhiloxKey& key, uint32_t* refused);

// y = the decoded elements, rounded to run.dtype. Refuses what GridCodec::decode refuses: a base or step that is not
// finite (except for poison's own), an invalid code, padding bits that are not 0; y is then written all the same,
// within its bounds.
void decodeGrid(const Place& place, const GridRun& run, void* y, const void* payload, uint32_t* refused);

// acc += the decoded elements, in float32 whatever run.dtype. Refuses as decodeGrid; acc is then without meaning.
void decodeAddGrid(const Place& place, const GridRun& run, float* acc, const void* payload, uint32_t* refused);

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

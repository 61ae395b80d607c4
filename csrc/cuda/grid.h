#pragma once

#include <cstddef>
#include <cstdint>

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
// payload being then without meaning, under nonfinite=error a NaN, an infinity, a magnitude of finiteLimit(codec) and
// more; under nonfinite=poison these are sent as GridCodec does.
void encodeGrid(const Place& place, const GridRun& run, void* payload, const void* x, uint64_t block,
                const PhiloxKey& key, uint32_t* refused);

// y = the decoded elements, rounded to run.dtype. Refuses what GridCodec::decode refuses: a base or step that is not
// finite (except for poison's own), padding bits that are not 0; y is then written all the same, within its bounds.
void decodeGrid(const Place& place, const GridRun& run, void* y, const void* payload, uint32_t* refused);

// acc += the decoded elements, in float32 whatever run.dtype. Refuses as decodeGrid; acc is then without meaning.
void decodeAddGrid(const Place& place, const GridRun& run, float* acc, const void* payload, uint32_t* refused);

}  // namespace lowcomm::cuda

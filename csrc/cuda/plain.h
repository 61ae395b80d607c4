#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "codec/spec.h"
#include "cuda/device.h"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// Codecs that code every element by itself, for tensors that lie on a CUDA device: the bytes and values of the host's
// codecs. Pointers, `refused` and what is thrown are grid.h's: the payload, of encodedBytes(count, dtype) bytes, is
// aligned to 16, elements to their type; 16 bytes (float16, bfloat16: 8) is what makes loads and stores wide. One
// kernel a call. Executed by the tests' simulator only so far.

// A run of a tensor of a codec that codes every element by itself (casts, scalars), cut at a multiple of 512 elements.
struct PlainRun {
  CodecSpec codec;
  DType dtype = DType::float32;  // of the elements: float32, float16, bfloat16
  uint64_t count = 0;            // elements; above 2^31 too. 0: nothing is enqueued
};

// ---- casts: fp16, bf16 and bf16:round=stochastic, fp8e4m3 (codec/cast.cpp; FORMAT.md, "Casts") ----

// Payload of the elements x. `block` is the number in the whole tensor of the run's first block of 512; only
// round=stochastic draws. Refuses, under nonfinite=error, a NaN and an infinity; the payload is then without meaning.
void encodeCast(const Place& place, const PlainRun& run, void* payload, const void* x, uint64_t block,
                const PhiloxKey& key, uint32_t* refused);

// y = the decoded elements, rounded to run.dtype; finite ones stay finite. Refuses what the host does: a code
// that is no finite number (except for poison's own), padding that is not 0; y is then written all the same.
void decodeCast(const Place& place, const PlainRun& run, void* y, const void* payload, uint32_t* refused);

// acc += the decoded elements, in float32 whatever run.dtype. Refuses as decodeCast; acc is then without meaning.
void decodeAddCast(const Place& place, const PlainRun& run, float* acc, const void* payload, uint32_t* refused);

// ---- scalars: logbyte and log9 (codec/float_codec.cpp; FORMAT.md, "Scalars") ----

// Payload of the elements x. Every element has a code, so that nothing is refused.
void encodeScalar(const Place& place, const PlainRun& run, void* payload, const void* x);

// y = the decoded elements, rounded to run.dtype. Refuses bits that are not 0 where nothing is; y is then written all
// the same.
void decodeScalar(const Place& place, const PlainRun& run, void* y, const void* payload, uint32_t* refused);

// acc += the decoded elements, in float32 whatever run.dtype. Refuses as decodeScalar; acc is then without meaning.
void decodeAddScalar(const Place& place, const PlainRun& run, float* acc, const void* payload, uint32_t* refused);

}  // namespace lowcomm::cuda

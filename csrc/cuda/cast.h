#pragma once

#include <cstdint>

#include "cuda/device.h"
#include "cuda/plain_run.h"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// The casts (fp16, bf16 and bf16:round=stochastic, fp8e4m3) for tensors that lie on a CUDA device: the bytes and values
// of CastCodec (codec/cast.h). FORMAT.md, "Casts". Pointers, `refused` and what is thrown are grid.h's: the payload, of
// CastCodec::encodedBytes(count, dtype) bytes, is aligned to 16, elements to their type; 16 bytes (float16, bfloat16:
// 8) is what makes loads and stores wide. One kernel a call. Executed by the tests' simulator only so far.

// Payload of the elements x. `block` is the number in the whole tensor of the run's first block of 512; only
// round=stochastic draws. Refuses, under nonfinite=error, a NaN and an infinity; the payload is then without meaning.
void encodeCast(const Place& place, const PlainRun& run, void* payload, const void* x, uint64_t block,
                const PhiloxKey& key, uint32_t* refused);

// y = the decoded elements, rounded to run.dtype; finite ones stay finite. Refuses what CastCodec::decode does: a code
// that is no finite number (but for poison's own), padding that is not 0; y is then written all the same.
void decodeCast(const Place& place, const PlainRun& run, void* y, const void* payload, uint32_t* refused);

// acc += the decoded elements, in float32 whatever run.dtype. Refuses as decodeCast; acc is then without meaning.
void decodeAddCast(const Place& place, const PlainRun& run, float* acc, const void* payload, uint32_t* refused);

}  // namespace lowcomm::cuda

#pragma once

#include <cstdint>

#include "cuda/device.h"
#include "cuda/plain_run.h"

namespace lowcomm::cuda {

// logbyte and log9 for tensors that lie on a CUDA device: the bytes and values of ScalarCodec (codec/scalar.h).
// FORMAT.md, "Scalars". Pointers, `refused` and what is thrown are grid.h's: the payload, of
// ScalarCodec::encodedBytes(count, dtype) bytes, is aligned to 16, elements to their type; 16 bytes (float16, bfloat16:
// 8) is what makes loads and stores wide. One kernel a call. Executed by the tests' simulator only so far.

// Payload of the elements x. Every element has a code, so that nothing is refused.
void encodeScalar(const Place& place, const PlainRun& run, void* payload, const void* x);

// y = the decoded elements, rounded to run.dtype. Refuses bits that are not 0 where nothing is; y is then written all
// the same.
void decodeScalar(const Place& place, const PlainRun& run, void* y, const void* payload, uint32_t* refused);

// acc += the decoded elements, in float32 whatever run.dtype. Refuses as decodeScalar; acc is then without meaning.
void decodeAddScalar(const Place& place, const PlainRun& run, float* acc, const void* payload, uint32_t* refused);

}  // namespace lowcomm::cuda

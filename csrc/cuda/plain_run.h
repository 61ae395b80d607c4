#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "codec/spec.h"

namespace lowcomm::cuda {

// A run of a tensor of a codec that codes every element by itself (casts, scalars), cut at a multiple of 512 elements.
struct PlainRun {
  CodecSpec codec;
  DType dtype = DType::float32;  // of the elements: float32, float16, bfloat16
  uint64_t count = 0;            // elements; above 2^31 too. 0: nothing is enqueued
};

}  // namespace lowcomm::cuda

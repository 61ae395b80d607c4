#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "codec/element.h"
#include "codec/payload.h"
#include "cuda/plain_run.h"

namespace lowcomm::cuda {

// Throws what grid.h says of a run that is not `expected`'s ("a cast"), of other elements and of a misaligned payload.
inline void checkPlainRun(const char* doing, const PlainRun& run, bool is_one, const char* expected,
                          const void* payload) {
  const auto fail = [&](const char* what, const std::string& wanted, const std::string& got) {
    return std::string(doing) + ": " + what + ": expected " + wanted + ", got " + got;
  };
  if (!is_one) throw ValueError(fail("codec", expected, run.codec.str()));
  if (const auto why = misfit(run.codec)) throw ValueError(std::string(doing) + ": " + *why);
  if (!isCoded(run.dtype)) throw TypeError(fail("elements", "float32, float16 or bfloat16", dtypeName(run.dtype)));
  if (const auto at = reinterpret_cast<uintptr_t>(payload); at % 16 != 0) {
    throw ValueError(fail("payload", "an address that is a multiple of 16", std::to_string(at % 16) + " more"));
  }
}

}  // namespace lowcomm::cuda

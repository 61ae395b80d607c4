#pragma once

#include <cstdint>
#include <string>

#include "codec/spec.h"
#include "kernels/dtype.h"

namespace lowcomm {

// Throws NonFiniteError for the first of `count` elements that `codec` does not take (finiteLimit), counted from
// `first`. `of` ends the message.
void expectFinite(const CodecSpec& codec, const void* x, DType dtype, uint64_t first, uint64_t count,
                  const std::string& of = "");

}  // namespace lowcomm

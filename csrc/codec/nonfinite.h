#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "codec/spec.h"

namespace lowcomm {

// Throws NonFiniteError for the first of `count` elements that `codec` does not take (finiteLimit), counted from
// `first`. `of` ends the message.
void expectFinite(const CodecSpec& codec, const void* x, DType dtype, uint64_t first, uint64_t count,
                  const std::string& of = "");

}  // namespace lowcomm

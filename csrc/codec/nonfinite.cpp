#include "codec/nonfinite.h"

#include <cmath>

#include "codec/error.h"
#include "kernels/finite.h"
#include "kernels/half.h"

namespace lowcomm {
namespace {

float valueAt(const void* x, DType dtype, int64_t i) {
  if (dtype == DType::float32) return static_cast<const float*>(x)[i];
  const uint16_t half = static_cast<const uint16_t*>(x)[i];
  return dtype == DType::float16 ? float16ToFloat(half) : bfloat16ToFloat(half);
}

}  // namespace

void expectFinite(const CodecSpec& codec, const void* x, DType dtype, uint64_t first, uint64_t count,
                  const std::string& of) {
  const float limit = finiteLimit(codec);
  const int64_t bad = firstNonFinite(x, dtype, count, limit);
  if (bad < 0) return;
  throw NonFiniteError(codec.str(), valueAt(x, dtype, bad), first + static_cast<uint64_t>(bad), limit, of);
}

}  // namespace lowcomm

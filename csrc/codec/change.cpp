#include "codec/change.h"

#include <algorithm>

#include "kernels/cast/cast.h"
#include "kernels/isa/table.h"

namespace lowcomm {

Elements further(Elements x, uint64_t at) {
  return {static_cast<const std::byte*>(x.data) + at * itemBytes(x.dtype), x.dtype};
}

State further(State x, uint64_t at) {
  return {static_cast<std::byte*>(x.data) + at * itemBytes(x.dtype), x.dtype};
}

void fetch(Elements x, uint64_t count) {
  const auto* at = static_cast<const char*>(x.data);
  for (uint64_t i = 0; i < count * itemBytes(x.dtype); i += 64)
    __builtin_prefetch(at + i);
}

const float* widened(const KernelTable& table, Elements x, uint64_t count, float* memory) {
  if (x.dtype == DType::float32) return static_cast<const float*>(x.data);
  const auto widen = x.dtype == DType::float16 ? table.float16_to_float : table.bfloat16_to_float;
  widen(memory, static_cast<const uint16_t*>(x.data), count);
  return memory;
}

void keep(const KernelTable& table, State to, float* x, uint64_t count) {
  if (to.dtype == DType::float32) {
    std::copy_n(x, count, static_cast<float*>(to.data));
    return;
  }
  const bool half = to.dtype == DType::float16;
  const auto hold = half ? table.casts->to_float16 : table.casts->to_bfloat16;
  if (hold(static_cast<Code16*>(to.data), x, count)) return;
  // A sum was infinite: the loops for codes refuse it.
  for (uint64_t i = 0; i < count; ++i)
    x[i] = heldState(x[i], half ? kFloat16Largest : kBfloat16Largest);
  (half ? table.float_to_float16 : table.float_to_bfloat16)(static_cast<uint16_t*>(to.data), x, count);
}

}  // namespace lowcomm

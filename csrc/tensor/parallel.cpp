#include "tensor/parallel.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace lowcomm {

// Torch's own loop over the elements of a tensor runs on its threads: here over one element a part.
void inParallel(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> part) {
  const int64_t units = (count + grain - 1) / grain, parts = std::min<int64_t>(units, at::get_num_threads());
  if (parts <= 1) {
    if (count > 0) part(0, count);
    return;
  }
  const c10::InferenceMode inference(false);
  at::Tensor places = at::empty({parts}, at::TensorOptions(at::kCPU).dtype(at::kByte));
  at::TensorIterator iterator = at::TensorIterator::nullary_op(places);
  const char* const first = static_cast<const char*>(places.const_data_ptr());
  iterator.for_each(
      [&](char** data, const int64_t*, int64_t n) {
        const int64_t from = data[0] - first;
        part(units * from / parts * grain, std::min(count, units * (from + n) / parts * grain));
      },
      1);
}

}  // namespace lowcomm

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstdint>

namespace lowcomm {

// Calls part(begin, end) for parts of [0, count), which begin at multiples of `grain`, on torch's threads; returns when
// all are done. What a part throws is thrown. at::parallel_for does so only in code that is compiled with torch's
// OpenMP, which ours is not: there it is one call. Other threads have neither the caller's grad mode nor its
// InferenceMode.
inline void inParallel(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> part) {
  const int64_t units = (count + grain - 1) / grain, parts = std::min<int64_t>(units, at::get_num_threads());
  if (parts <= 1) {
    if (count > 0) part(0, count);
    return;
  }
  // Torch's own loop over the elements of a tensor runs on its threads: here over one element a part.
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

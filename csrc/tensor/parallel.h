#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace lowcomm {

// Calls part(begin, end) for parts of [0, count), which begin at multiples of `grain`, on torch's threads; returns when
// all are done. What a part throws is thrown. at::parallel_for does so only in code that is compiled with torch's
// OpenMP, which ours is not: there it is one call. Other threads have neither the caller's grad mode nor its
// InferenceMode.
void inParallel(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> part);

}  // namespace lowcomm

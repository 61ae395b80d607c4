#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "collective/context.h"
#include "collective/plan.h"
#include "kernels/dtype.h"
#include "kernels/reduce.h"
#include "wire/layout.h"

namespace lowcomm {

// One tensor to reduce and scatter. `inputs[r]` is the slice that rank r will own, layout.elements() elements each;
// `output` takes the reduction of every rank's slice for this rank, and may be inputs[rank].
struct ScatterMessage {
  Layout layout;  // of one slice
  DType dtype = DType::opaque;
  std::vector<const void*> inputs;
  void* output = nullptr;
  Draws draws;                 // stream of the slice for rank 0; the slice for rank r is r·segments slots on
  std::string type_name = {};  // as in GatherMessage, of one slice
  uint64_t type_elements = 0;
};

struct Reduction {
  ReduceKind kind = ReduceKind::sum;
  bool average = false;  // divide by the number of ranks, once, after the sum
  double premultiply = 1.0;
  bool premultiplied = false;  // multiply every contribution by `premultiply` before it is encoded
};

// reduce_scatter by direct exchange: each rank sends every other its slice and sums what it gets in rank order, so
// (W−1)/W of the input goes out where a ring all_reduce and a slice (gloo's way) move twice that. Deterministic.
// Contributions are accumulated in fp32 where the dtype is narrower, in the dtype where it is wider or integer. A
// rank's own contribution is not quantized. A codec needs kind == sum. Throws as runExchange; TypeError for a dtype
// that a codec does not take or a pair that reduceSupports refuses.
void reduceScatter(OpContext& op, const std::vector<ScatterMessage>& messages, const Reduction& reduction);

}  // namespace lowcomm

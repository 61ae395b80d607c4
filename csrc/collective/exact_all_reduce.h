#pragma once

#include <cstdint>
#include <vector>

#include "collective/context.h"
#include "collective/contributions.h"

namespace lowcomm {

// A tensor of fp32 elements in host memory, reduced in place.
struct ExactTensor {
  float* data = nullptr;
  uint64_t elements = 0;
};

// all_reduce without a codec: a reduce_scatter of the tensors' slices (collective/slices.h), then an all_gather of the
// sums, so 2(W−1)/W of the bytes go out and come in. Summed in rank order in fp32, an average divided once after: all
// ranks end with the same bits. Takes two sequence numbers, op.sequence and the next. Throws as runExchange.
void exactAllReduce(OpContext& op, const std::vector<ExactTensor>& tensors, const Reduction& reduction);

}  // namespace lowcomm

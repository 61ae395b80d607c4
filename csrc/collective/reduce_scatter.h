#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "wire/layout.h"

namespace lowcomm {

class DeviceCodec;
class OpContext;
struct Reduction;

// One tensor to reduce and scatter. `inputs[r]` is the slice that rank r will own; `output` takes the reduction of
// every rank's slice for this rank, and may be inputs[rank].
struct ScatterMessage {
  std::vector<Layout> layouts;  // of every rank's slice, or one for all
  DType dtype = DType::opaque;
  std::vector<const void*> inputs;
  void* output = nullptr;
  Draws draws;  // stream of the slice for rank 0; the slice for rank r is r·segments slots on, a segment one more
};

// reduce_scatter by direct exchange: each rank sends every other its slice and sums what it gets in rank order, so
// (W−1)/W of the input goes out where a ring all_reduce and a slice (gloo's way) move twice that. Deterministic.
// Contributions are accumulated in fp32 where the dtype is narrower, in the dtype where it is wider or integer. A
// rank's own contribution is not quantized. A codec needs kind == sum. Throws as runExchange; TypeError for a dtype
// that a codec does not take, ValueError for a wrong number of layouts, and as makeSummer. The elements are in host
// memory, or where `device_codec` is, with the limits of makeSummer; frames, bits and errors are the same.
void reduceScatter(OpContext& op, const std::vector<ScatterMessage>& messages, const Reduction& reduction,
                   DeviceCodec* device_codec = nullptr);

}  // namespace lowcomm

#pragma once

#include <vector>

#include "collective/context.h"
#include "collective/device_codec.h"
#include "collective/reduce_scatter.h"

namespace lowcomm {

// reduceScatter of float32, float16 or bfloat16 elements that `device_codec` has, inputs and output: same frames, same
// bits and same errors, so that ranks that stage and ranks that do not may take part in one op. For codecs that the
// device codec takes and that do not saturate, and sums that are not premultiplied.
void reduceScatterStaged(OpContext& op, DeviceCodec& device_codec, const std::vector<ScatterMessage>& messages,
                         const Reduction& reduction);

}  // namespace lowcomm

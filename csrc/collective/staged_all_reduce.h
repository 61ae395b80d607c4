#pragma once

#include <vector>

#include "collective/all_reduce.h"
#include "collective/context.h"
#include "collective/device_codec.h"

namespace lowcomm {

// allReduce of tensors that `device_codec` has: same frames, same bits and same errors, so that ranks that stage and
// ranks that do not may take part in one op. Slices are encoded, summed, and the sums encoded and decoded, on the
// device. In a group of two ranks and more; without residuals, for codecs that the device codec takes and that do not
// saturate, and sums that are not premultiplied.
void allReduceStaged(OpContext& op, DeviceCodec& device_codec, const std::vector<AllReduceMessage>& messages,
                     const Reduction& reduction);

}  // namespace lowcomm

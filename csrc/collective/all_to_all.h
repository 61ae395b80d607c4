#pragma once

#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "wire/layout.h"

namespace lowcomm {

class DeviceCodec;
class OpContext;

// One tensor a pair of ranks: that at `inputs[r]` for rank r, that of rank r to `outputs[r]`. Sizes and codecs may
// differ by pair; what one rank sends the other expects. No output overlaps an input.
struct AllToAllMessage {
  DType dtype = DType::float32;
  std::vector<Layout> sent, got;  // by rank; Layout::single
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  Draws draws;  // stream of the part for rank 0; that for rank r is r slots on
  // Where inputs and outputs are; null: in host memory. Not with a codec that saturates: what a rank keeps would have
  // to be repaired on a device.
  DeviceCodec* device_codec = nullptr;
  std::string type_name = {};  // the caller's element type, which ranks compare; set it where dtype is opaque
};

// all_to_all by direct exchange, encoded or (codec none) exact. The part that a rank keeps is copied (and obeys the
// codec's nonfinite=). Throws as runExchange; TypeError for a dtype that the codec does not take, ValueError where a
// rank's own part is not as long in as out.
void allToAll(OpContext& op, const AllToAllMessage& message);

}  // namespace lowcomm

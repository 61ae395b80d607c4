#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "collective/context.h"
#include "collective/plan.h"
#include "kernels/dtype.h"
#include "wire/layout.h"

namespace lowcomm {

// One tensor to gather. `input` holds layout.elements() elements; `outputs[r]` takes rank r's, and may be where `input`
// is for this rank. All memory must live until the op is done.
struct GatherMessage {
  Layout layout;  // Layout::single(n, none) is exact
  DType dtype = DType::opaque;
  const void* input = nullptr;
  std::vector<void*> outputs;
  Draws draws;  // stream without its segment number; used by stochastic codecs
  // The caller's element type and number of elements, which ranks compare (MessagePlan). Set them where dtype is
  // opaque.
  std::string type_name = {};
  uint64_t type_elements = 0;
};

// all_gather by direct exchange: every rank sends its (encoded) message to every other, (W−1)·n elements out and in.
// The owner decodes its own codes too, so all ranks end with identical bits. Exact without a codec.
// Throws as runExchange; TypeError when a codec does not take the dtype.
void allGather(OpContext& op, const std::vector<GatherMessage>& messages);

}  // namespace lowcomm

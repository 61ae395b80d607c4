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

// One tensor to gather. `input` holds the elements of this rank's layout; `outputs[r]` takes rank r's, and may be where
// `input` is for this rank. All memory must live until the op is done.
struct GatherMessage {
  std::vector<Layout> layouts;  // of every rank's part, or one for all; Layout::single(n, none) is exact
  DType dtype = DType::opaque;
  const void* input = nullptr;
  std::vector<void*> outputs;
  Draws draws;  // stream without its segment number; used by stochastic codecs
  // The caller's element type and numbers of elements, which ranks compare. Set them where dtype is opaque.
  std::string type_name = {};
  std::string type_elements = {};
  // Where `input` and `outputs` are, with float32, float16 or bfloat16 elements; null: in host memory.
  DeviceCodec* device_codec = nullptr;
};

// all_gather. Every rank's (encoded) message reaches every other, (W−1)·n elements out and in; the owner decodes its
// own codes too, so all ranks end with identical bits. Exact without a codec. Direct: each rank sends to all others.
// From GroupContext::ring_from ranks on by a ring: each rank sends to the next one only, its own codes and then those
// that came from the one before, W−1 steps in all; the same bytes in all, and where parts are equal a rank, and the
// same results, over W connections instead of W·(W−1). Throws as runExchange; TypeError when a codec does not take the
// dtype, ValueError for a wrong number of layouts.
void allGather(OpContext& op, const std::vector<GatherMessage>& messages);

}  // namespace lowcomm

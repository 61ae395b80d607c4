#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/spec.h"

namespace lowcomm {

class DeviceCodec;
class OpContext;

// One tensor of `elements` elements, the same number on every rank.
struct BroadcastMessage {
  uint64_t elements = 0;
  CodecSpec codec;
  DType dtype = DType::float32;
  void* data = nullptr;  // the root's are sent, everybody's are overwritten by what they decode to
  Draws draws;
  DeviceCodec* device_codec = nullptr;  // where `data` is; null: in host memory
  // The caller's element type and number of elements, which ranks compare. Set them where dtype is opaque.
  std::string type_name = {}, type_elements = {};
};

// broadcast, encoded or (codec none) exact: `root` sends its encoded tensor to every rank and decodes it too, so all
// ranks end with identical bits. Throws as runExchange; TypeError for a dtype that the codec does not take, ValueError
// for a root that is none of the ranks.
void broadcast(OpContext& op, const std::vector<BroadcastMessage>& messages, int root);

struct RootGatherMessage {
  uint64_t elements = 0;
  CodecSpec codec;
  DType dtype = DType::float32;
  const void* input = nullptr;
  std::vector<void*> outputs;  // on the root, by rank; its own may be where `input` is
  Draws draws;
  DeviceCodec* device_codec = nullptr;             // where `input` and `outputs` are; null: in host memory
  std::string type_name = {}, type_elements = {};  // as of a broadcast
};

// gather, encoded or exact: every rank sends its encoded tensor to `root`, which decodes them, and its own as the
// others would see it. Throws as broadcast.
void gather(OpContext& op, const std::vector<RootGatherMessage>& messages, int root);

}  // namespace lowcomm

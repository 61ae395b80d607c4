#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/spec.h"
#include "wire/key_values.h"
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
// own codes too, so all ranks end with identical bits. Exact without a codec. Throws as runExchange; TypeError when a
// codec does not take the dtype, ValueError for a wrong number of layouts.
void allGather(OpContext& op, const std::vector<GatherMessage>& messages);

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
// for a root outside of the group.
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

// One tensor to reduce to a root, exact.
struct RootReduceMessage {
  uint64_t elements = 0;
  DType dtype = DType::float32;
  const void* input = nullptr;
  void* output = nullptr;  // on the root; may be `input`. Null on other ranks, which keep their elements
};

// reduce: the root has what an exact allReduce() would leave there, bit for bit, and the others nothing. Sums are in
// rank order. Throws as allReduce() and broadcast.
void reduce(OpContext& op, const std::vector<RootReduceMessage>& messages, const Reduction& reduction, int root);

struct RootScatterMessage {
  uint64_t elements = 0;  // of a part
  DType dtype = DType::float32;
  std::vector<const void*> inputs;  // on the root, by rank; empty on the others
  void* output = nullptr;
  std::string type_name = {}, type_elements = {};  // as of a broadcast
};

// scatter, exact: the root sends every rank the part that is its, and copies its own. Throws as broadcast.
void scatter(OpContext& op, const std::vector<RootScatterMessage>& messages, int root);

// Throws ValueError for a root outside of the group.
void expectRoot(const OpContext& op, int root);

// Returns when every rank has called it. Throws as runExchange.
void barrier(OpContext& op);

// The same, by rank 0, which waits for `timeout` at most and names the first rank that has not come, or with
// `wait_all_ranks` all of them. PeerError on every rank that came: the group is over.
void monitoredBarrier(OpContext& op, std::chrono::milliseconds timeout, bool wait_all_ranks);

// One tensor a pair of ranks: that at `inputs[r]` for rank r, that of rank r to `outputs[r]`. Sizes and codecs may
// differ by pair; what one rank sends the other expects. No output overlaps an input.
struct AllToAllMessage {
  DType dtype = DType::float32;
  std::vector<Layout> sent, got;  // by rank; Layout::single
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  Draws draws;                          // stream of the part for rank 0; that for rank r is r slots on
  DeviceCodec* device_codec = nullptr;  // where inputs and outputs are; null: in host memory
  std::string type_name = {};           // the caller's element type, which ranks compare; set it where dtype is opaque
};

// all_to_all by direct exchange, encoded or (codec none) exact. The part that a rank keeps is copied (and obeys the
// codec's nonfinite=). Throws as runExchange; TypeError for a dtype that the codec does not take, ValueError where a
// rank's own part is not as long in as out.
void allToAll(OpContext& op, const AllToAllMessage& message);

// Ranks compare a set of named values over the control lane: a policy being changed, a layout being registered.
// Collective. Throws PeerRefusal naming the first field that differs, both values and both ranks, on every rank (each
// compares with each); the group goes on. A rank that has a field "error" is named with it. PeerError as in
// runExchange.
void agree(OpContext& op, const KeyValues& mine);

}  // namespace lowcomm

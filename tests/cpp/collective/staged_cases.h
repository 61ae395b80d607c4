#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collective/all_reduce.h"
#include "collective/collectives.h"
#include "collective/summer.h"
#include "host_device_codec.h"
#include "ranks_on_threads.h"

namespace lowcomm::test {

inline const Reduction kSum;
inline const Reduction kAverage{ReduceKind::sum, true};

// Which ranks stage: bit r for rank r.
using Staging = unsigned;
inline constexpr Staging kNobody = 0, kAll = ~0u, kEven = 0x55555555u;

// One op on one rank, with the device codec that its elements are on, or null.
using Op = std::function<void(int rank, OpContext& op, DeviceCodec* device_codec)>;

inline Ranks::Job on(Staging staging, Op op) {
  return [=](int rank, OpContext& context) {
    const auto device_codec = staging >> rank & 1 ? lateDeviceCodec(context.group.chunk_bytes) : nullptr;
    op(rank, context, device_codec.get());
  };
}

// Of x, to as many parts of y as it has room for.
inline GatherMessage gatherOf(const std::vector<float>& x, std::vector<float>& y, const CodecSpec& codec,
                              DeviceCodec* device_codec) {
  GatherMessage message;
  message.layouts = {Layout::single(x.size(), codec)};
  message.dtype = DType::float32;
  message.input = x.data();
  for (float* part = y.data(); part < y.data() + y.size(); part += x.size())
    message.outputs.push_back(part);
  message.device_codec = device_codec;
  return message;
}

}  // namespace lowcomm::test

#pragma once

// One boundary between two ranks on threads, with a memory on each side.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine/op_queue.h"
#include "p2p_cases.h"
#include "pipeline/boundary_channel.h"

namespace lowcomm::test {

inline constexpr uint64_t kSample = 6000;  // elements of a sample: no multiple of a bucket

// One direction between ranks 0 and 1, with a memory on each side.
struct Boundary {
  // `store`: as SlotFormat::parse has it, of tensors whose last dimension is 60.
  Boundary(Ranks& ranks, const DeltaCodecs& codecs, DType dtype = DType::float32, const std::string& store = "fp16")
      : dtype(dtype) {
    for (int rank : {0, 1}) {
      memories[rank] = std::make_shared<SampleMemory>(SlotFormat::parse(store, kSample, 60));
      channels[rank] = std::make_shared<BoundaryChannel>(std::make_shared<EngineQueue>(ranks.engine(rank)), 1 - rank, 3,
                                                         ChannelOptions{dtype, codecs, 7}, memories[rank]);
    }
  }

  // Rank 1's tensor after a message, and each side's error text, or "".
  struct Result {
    Bytes y;
    std::string errors[2];
  };
  Result move(Ranks& ranks, const Bytes& x, const std::vector<uint64_t>& samples) {
    Result result{Bytes(x.size(), std::byte{0x55}), {}};
    together(ranks, [&](int rank, Engine&) {
      result.errors[rank] = thrownBy([&] {
        const uint64_t elements = samples.size() * kSample;
        auto message = rank == 0 ? channels[0]->send(x.data(), elements, samples)
                                 : channels[1]->recv(result.y.data(), elements, samples);
        message->wait();
        if (rank == 0) counted += message->samples();
      });
      if (result.errors[rank] == kNothing) result.errors[rank].clear();
    });
    return result;
  }

  const DType dtype;
  SampleCounters counted;  // of the sends
  std::shared_ptr<SampleMemory> memories[2];
  std::shared_ptr<BoundaryChannel> channels[2];
};

inline DeltaCodecs codecsOf(const std::string& seen, const std::string& first) {
  const auto spec = [](const std::string& text) { return text.empty() ? CodecSpec{} : CodecSpec::parse(text); };
  return {spec(seen), spec(first)};
}

// Activations that move by a tenth of their size from visit to visit.
inline Bytes activations(DType dtype, const std::vector<uint64_t>& samples, uint32_t visit) {
  std::vector<float> values;
  for (uint64_t sample : samples) {
    const auto base = normal(kSample, static_cast<uint32_t>(sample)), drift = normal(kSample, 1000 + visit, 0.1f);
    for (uint64_t i = 0; i < kSample; ++i)
      values.push_back(base[i] + drift[i]);
  }
  return elementsOf(dtype, values);
}

inline double distance(DType dtype, const Bytes& x, const Bytes& y) {
  double lost = 0, whole = 0;
  for (size_t at = 0; at < x.size(); at += itemBytes(dtype)) {
    const double a = toFloat(dtype, x.data() + at), b = toFloat(dtype, y.data() + at);
    lost += (a - b) * (a - b);
    whole += a * a;
  }
  return std::sqrt(lost / whole);
}

}  // namespace lowcomm::test

#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "collective/collectives.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "ranks_on_threads.h"

// all_gather and reduce_scatter of several messages, with the definition of what every rank must get.
namespace lowcomm::test {

// What the two have in common.
class ManyMessages {
 public:
  ManyMessages(int size, std::vector<TensorKind> tensors, bool in_place, uint32_t step)
      : size_(size), tensors_(std::move(tensors)), in_place_(in_place), step_(step) {}

 protected:
  Draws draws(int rank, size_t m) const {
    return {5, static_cast<uint32_t>(rank << 16) + static_cast<uint32_t>(m * 300), step_};
  }

  std::string textOf(int rank, size_t m) const {
    const TensorKind& tensor = tensors_[m];
    return "rank " + std::to_string(rank) + " of " + std::to_string(size_) + ", message " + std::to_string(m) + ": " +
           dtypeName(tensor.dtype) + " " + tensor.of(rank).text().substr(0, 200);
  }

  const int size_;
  const std::vector<TensorKind> tensors_;
  const bool in_place_;
  const uint32_t step_;
};

class Gather : public ManyMessages {
 public:
  Gather(int size, std::vector<TensorKind> tensors, bool in_place, uint32_t step = 3)
      : ManyMessages(size, std::move(tensors), in_place, step), inputs_(size), outputs_(size) {
    for (int rank = 0; rank < size; ++rank) {
      for (size_t m = 0; m < tensors_.size(); ++m) {
        const auto seed = static_cast<uint32_t>(1000 * rank + m);
        inputs_[rank].push_back(randomTensor(tensors_[m].dtype, tensors_[m].of(rank).elements(), seed));
        outputs_[rank].emplace_back();
        // Everything a rank must write is wrong before it does.
        for (int owner = 0; owner < size; ++owner) {
          const uint64_t bytes = tensors_[m].of(owner).elements() * itemBytes(tensors_[m].dtype);
          outputs_[rank][m].emplace_back(bytes, std::byte{0xdd});
        }
        if (in_place) outputs_[rank][m][rank] = inputs_[rank][m];
      }
    }
  }

  void operator()(int rank, OpContext& op, DeviceCodec* device_codec = nullptr) {
    std::vector<GatherMessage> messages;
    for (size_t m = 0; m < tensors_.size(); ++m) {
      GatherMessage message{tensors_[m].layouts, tensors_[m].dtype};
      message.input = in_place_ ? outputs_[rank][m][rank].data() : inputs_[rank][m].data();
      for (Bytes& output : outputs_[rank][m])
        message.outputs.push_back(output.data());
      message.draws = draws(rank, m);
      message.device_codec = device_codec;
      messages.push_back(std::move(message));
    }
    allGather(op, messages);
  }

  // Compared as bytes: all ranks are then bit-equal too.
  void expectDefinition() const {
    for (size_t m = 0; m < tensors_.size(); ++m) {
      for (int owner = 0; owner < size_; ++owner) {
        const Bytes expected = asDecoded(tensors_[m].of(owner), tensors_[m].dtype, inputs_[owner][m], draws(owner, m));
        for (int rank = 0; rank < size_; ++rank)
          EXPECT_TRUE(outputs_[rank][m][owner] == expected) << "at rank " << rank << " of " << textOf(owner, m);
      }
    }
  }

  const Bytes& output(int rank, size_t m, int owner) const { return outputs_[rank][m][owner]; }

 private:
  std::vector<std::vector<Bytes>> inputs_;                // [rank][message]
  std::vector<std::vector<std::vector<Bytes>>> outputs_;  // [rank][message][owner]
};

inline std::vector<OpCounters> expectGathers(Ranks& ranks, std::vector<TensorKind> tensors, bool in_place = false) {
  Gather gather(ranks.size(), std::move(tensors), in_place);
  auto counters = ranks.expectRun("all_gather", std::ref(gather));
  gather.expectDefinition();
  return counters;
}

inline std::vector<OpCounters> expectGathers(int size, std::vector<TensorKind> tensors, bool in_place = false) {
  Ranks ranks(size);
  return expectGathers(ranks, std::move(tensors), in_place);
}

class Scatter : public ManyMessages {
 public:
  Scatter(int size, std::vector<TensorKind> tensors, Reduction reduction, bool in_place, uint32_t step = 3)
      : ManyMessages(size, std::move(tensors), in_place, step), reduction_(reduction), slices_(size), outputs_(size) {
    for (int rank = 0; rank < size; ++rank) {
      for (size_t m = 0; m < tensors_.size(); ++m) {
        slices_[rank].emplace_back();
        for (int owner = 0; owner < size; ++owner) {
          const auto seed = static_cast<uint32_t>(10000 * rank + 100 * owner + m);
          slices_[rank][m].push_back(randomTensor(tensors_[m].dtype, tensors_[m].of(owner).elements(), seed));
        }
        outputs_[rank].push_back(in_place ? slices_[rank][m][rank]
                                          : Bytes(slices_[rank][m][rank].size(), std::byte{0xdd}));
      }
    }
  }

  void operator()(int rank, OpContext& op, DeviceCodec* device_codec = nullptr) {
    std::vector<ScatterMessage> messages;
    for (size_t m = 0; m < tensors_.size(); ++m) {
      ScatterMessage message{tensors_[m].layouts, tensors_[m].dtype};
      for (const Bytes& slice : slices_[rank][m])
        message.inputs.push_back(slice.data());
      message.output = outputs_[rank][m].data();
      if (in_place_) message.inputs[rank] = message.output;
      message.draws = draws(rank, m);
      messages.push_back(std::move(message));
    }
    reduceScatter(op, messages, reduction_, device_codec);
  }

  void expectDefinition() const {
    for (size_t m = 0; m < tensors_.size(); ++m) {
      for (int owner = 0; owner < size_; ++owner) {
        const DType dtype = tensors_[m].dtype;
        const bool is_float = dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
        EXPECT_TRUE(outputs_[owner][m] == (is_float ? byHand(owner, m) : byKernels(owner, m)))
            << reduction_.name() << " at " << textOf(owner, m);
      }
    }
  }

  const Bytes& output(int rank, size_t m) const { return outputs_[rank][m]; }

 private:
  Bytes contribution(int rank, int owner, size_t m) const {
    Bytes x = slices_[rank][m][owner];
    const DType dtype = tensors_[m].dtype;
    if (reduction_.premultiplied) scale(x.data(), x.data(), dtype, reduction_.premultiply, x.size() / itemBytes(dtype));
    return x;
  }

  // Sums in rank order in fp32; peers' contributions decoded, the owner's own as it is; rounded, then averaged.
  Bytes byHand(int owner, size_t m) const {
    const Layout& layout = tensors_[m].of(owner);
    const DType dtype = tensors_[m].dtype;
    std::vector<float> sum(layout.elements());
    for (int rank = 0; rank < size_; ++rank) {
      const Bytes x = contribution(rank, owner, m);
      Draws own = draws(rank, m);
      own.stream += static_cast<uint32_t>(owner * layout.segments().size());
      const std::vector<float> values = rank == owner ? floatsOf(dtype, x) : decodedFloats(layout, dtype, x, own);
      for (size_t i = 0; i < sum.size(); ++i)
        sum[i] = rank == 0 ? values[i] : reduced(sum[i], values[i]);
    }
    Bytes out = elementsOf(dtype, sum);
    if (!reduction_.average) return out;
    std::vector<float> rounded = floatsOf(dtype, out);
    for (float& value : rounded)
      value /= static_cast<float>(size_);
    return elementsOf(dtype, rounded);
  }

  float reduced(float a, float b) const {
    if (reduction_.kind == ReduceKind::product) return a * b;
    if (reduction_.kind == ReduceKind::min) return std::min(a, b);
    if (reduction_.kind == ReduceKind::max) return std::max(a, b);
    return a + b;
  }

  // Types that are reduced in themselves: reduce_test.cpp holds the kernels to a reference.
  Bytes byKernels(int owner, size_t m) const {
    const DType dtype = tensors_[m].dtype;
    const uint64_t elements = tensors_[m].of(owner).elements();
    Bytes sum = contribution(0, owner, m);
    for (int rank = 1; rank < size_; ++rank)
      reduceInto(sum.data(), contribution(rank, owner, m).data(), dtype, reduction_.kind, elements);
    reduceFinish(sum.data(), sum.data(), dtype, elements, reduction_.average ? size_ : 0);
    return sum;
  }

  const Reduction reduction_;
  std::vector<std::vector<std::vector<Bytes>>> slices_;  // [rank][message][owner]
  std::vector<std::vector<Bytes>> outputs_;              // [rank][message]
};

inline std::vector<OpCounters> expectScatters(int size, std::vector<TensorKind> tensors, const Reduction& reduction,
                                              bool in_place) {
  Scatter scatter(size, std::move(tensors), reduction, in_place);
  Ranks ranks(size);
  auto counters = ranks.expectRun("reduce_scatter", std::ref(scatter));
  scatter.expectDefinition();
  return counters;
}

}  // namespace lowcomm::test

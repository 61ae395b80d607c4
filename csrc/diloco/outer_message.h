#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "collective/all_reduce.h"
#include "diloco/outer_parameter.h"
#include "tensor/compression.h"
#include "tensor/device_queue.h"

namespace lowcomm {

class OpContext;

// Elements of a tensor on a device that an outer step works on at a time: it holds some copies of them.
constexpr int64_t kMostElements = 1 << 24;

// A message of a fragment under way: shared with its job, which may outlive the fragment.
struct OuterMessage {
  std::vector<std::shared_ptr<Compression>> compressions;
  std::vector<std::vector<double>> energies;  // by tensor; empty without a rank
  std::vector<double> rests;                  // by tensor: what the factors left out; 0 where it is not measured
  LowRankMessage coded;
  std::vector<AllReduceMessage> exact;
  double weight = 0;     // this rank's, of all ranks'; 0 on all: equal parts
  bool finite = false;   // coded, or placed; written on the worker, read after the ticket's wait
  CodedAverage average;  // of coded tensors without data

  // Adds a tensor whose average takes its place.
  ReduceTensor inPlace(const at::Tensor& message);

  // Adds one that is `x`, and whose average stays in its codes. `x` stays as it is until the op has ended.
  Elsewhere from(const at::Tensor& x);

  // Adds one that is a − b, likewise, made as it is encoded.
  Elsewhere difference(const at::Tensor& a, const at::Tensor& b);

  // The tensors in place and their residuals are on that queue's device, not in host memory, and have no rank: the op
  // encodes and sums there, behind what the current stream has been given until now, and codes alone are copied.
  // Without a codec the tensors are. When the op has ended, all that it made is there.
  void place(const DeviceQueue& queue);

  // On the group's worker.
  void run(OpContext& op);

  // This rank's part of the average times the number of ranks; 1 where parts are equal. Once the op has ended.
  float share() const { return share_; }

  // The averages of tensors in place are finite.
  bool inPlaceIsFinite() const;

 private:
  void weigh(OpContext& op);
  void runOnDevice(OpContext& op);
  void reduceValues(OpContext& op);
  void reduceCodes(OpContext& op);

  std::vector<at::Tensor> in_place_, read_;
  std::deque<MakeElements> makers_;
  float share_ = 1;
  std::optional<DeviceQueue> device_;
  DeviceQueue::Mark issued_;
};

// Throws ValueError in the name of the option `outer_place` unless messages of these tensors by that codec can be
// placed where they are: in host memory, or on one CUDA device that the build has kernels for.
void expectPlace(const std::vector<OuterParameter>& parameters, const CodecSpec& codec);

}  // namespace lowcomm

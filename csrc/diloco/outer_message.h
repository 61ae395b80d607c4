#pragma once

#include <ATen/ATen.h>

#include <deque>
#include <memory>
#include <vector>

#include "collective/all_reduce.h"
#include "diloco/outer_tensor.h"
#include "tensor/compression.h"

namespace lowcomm {

class OpContext;

// A message of a fragment under way: shared with its job, which may outlive the fragment.
struct OuterMessage {
  std::vector<std::shared_ptr<Compression>> compressions;
  std::vector<std::vector<double>> energies;  // by tensor; empty without a rank
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

  // On the group's worker.
  void run(OpContext& op);

  // This rank's part of the average times the number of ranks; 1 where parts are equal. Once the op has ended.
  float share() const { return share_; }

  // The averages of tensors in place are finite.
  bool inPlaceIsFinite() const;

 private:
  void weigh(OpContext& op);

  std::vector<at::Tensor> in_place_, read_;
  std::deque<MakeElements> makers_;
  float share_ = 1;
};

}  // namespace lowcomm

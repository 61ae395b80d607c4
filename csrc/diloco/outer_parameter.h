#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/op_queue.h"

namespace lowcomm {

// A tensor that an outer loop averages, under the name that its state has in a checkpoint. Of any device and floating
// dtype: what is not contiguous fp32 in host memory is copied there and back for an outer step, a CUDA fragment's
// parameters by one pinned buffer of their own types.
struct OuterParameter {
  std::string name;
  at::Tensor tensor;

  // Where the tensor is a box of a larger parameter, as a shard of FSDP2 is: the parameter's shape, and where the box
  // begins in it, by dimension. Empty: the tensor is all of it.
  std::vector<int64_t> whole = {}, offset = {};

  uint32_t number = 0;  // among all pieces of all ranks (SiteModel sets it): draws and summing are shared out by it
};

// The ranks of one site, which hold one model together. A part of the model is what some of them hold between them, as
// replicas, shards or both; the stages of a pipeline are parts. A default one is a rank by itself.
struct OuterSite {
  std::shared_ptr<OpQueue> ranks;  // null: this rank alone
  std::vector<int> parts;          // by rank: its part, 0, 1, …; empty: every rank has a part of its own
  std::vector<int> stripes;        // by part: its stripes (SiteModel); empty: as many as ranks hold it
};

}  // namespace lowcomm

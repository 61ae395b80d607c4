#pragma once

#include "backend/group_parts.h"

namespace lowcomm {

// all_to_all of codes where the policy names it, else the inner backend's. Arguments and results are c10d's. Called
// inside Coalescing::run().
WorkPtr issueAllToAllBase(GroupParts& parts, at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts);
WorkPtr issueAllToAll(GroupParts& parts, Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts);

}  // namespace lowcomm

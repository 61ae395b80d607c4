#pragma once

#include "backend/group_parts.h"
#include "wire/layout.h"

namespace lowcomm {

// reduce_scatter in every form of c10d, on lowcomm's own exchange; what that does not reduce goes to the inner backend.
// Arguments and results are c10d's. ValueError or TypeError before anything is sent. Called inside Coalescing::run().
WorkPtr issueReduceScatter(GroupParts& parts, Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts);
WorkPtr issueReduceScatterBase(GroupParts& parts, at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts);
WorkPtr issueReduceScatterCoalesced(GroupParts& parts, Tensors& outputs, Tensors& inputs,
                                    const c10d::ReduceScatterOptions& opts);

// Of a flat buffer [size·n] into [n], whose slices have the agreed layout.
WorkPtr issueReduceScatterLayout(GroupParts& parts, const at::Tensor& output, const at::Tensor& input,
                                 const Layout& layout, const c10d::ReduceOp& op, Counter counter);

}  // namespace lowcomm

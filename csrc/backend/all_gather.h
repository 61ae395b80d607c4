#pragma once

#include "backend/group_parts.h"
#include "wire/layout.h"

namespace lowcomm {

// all_gather in every form of c10d, on lowcomm's own exchange; what that does not take goes to the inner backend.
// Arguments and results are c10d's. ValueError or TypeError before anything is sent. Called inside Coalescing::run().
WorkPtr issueAllGather(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs,
                       const c10d::AllgatherOptions& opts);
WorkPtr issueAllGatherBase(GroupParts& parts, at::Tensor& output, at::Tensor& input,
                           const c10d::AllgatherOptions& opts);
// Of several tensors, into a list of outputs a rank.
WorkPtr issueAllGatherLists(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& opts);
// Of several tensors, each into one output.
WorkPtr issueAllGatherCoalesced(GroupParts& parts, Tensors& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts);

// Of a flat buffer whose layout was agreed: [n] into [size·n], one message, each segment by its own codec.
WorkPtr issueAllGatherLayout(GroupParts& parts, const at::Tensor& output, const at::Tensor& input, const Layout& layout,
                             Counter counter);

}  // namespace lowcomm

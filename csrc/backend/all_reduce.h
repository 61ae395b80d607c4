#pragma once

#include "backend/group_parts.h"
#include "tensor/residual.h"

namespace lowcomm {

// all_reduce where the policy names it, else the inner backend's. Arguments and results are c10d's. Called inside
// Coalescing::run().
WorkPtr issueAllReduce(GroupParts& parts, Tensors& tensors, const c10d::AllreduceOptions& opts);
WorkPtr issueAllReduceCoalesced(GroupParts& parts, Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts);

// all_reduce of one dense tensor by a codec named by the caller, whatever the policy, min_bytes and lc.exact() say;
// with error feedback where `residual` is not null. SUM, AVG, or (without a residual) PREMUL_SUM. ValueError or
// TypeError before anything is sent: another op, dtype or codec, a residual of another size or in use.
WorkPtr issueCodedAllReduce(GroupParts& parts, const at::Tensor& tensor, const c10d::ReduceOp& op,
                            const CodecSpec& codec, std::shared_ptr<Residual> residual);

}  // namespace lowcomm

#pragma once

#include "backend/group_parts.h"
#include "tensor/compression.h"

namespace lowcomm {

// all_reduce of tensors in one message or, where a state has a rank, in two (collective/low_rank_all_reduce.h),
// whatever policy and lc.exact() say. Of each tensor: its slot in the draws, of which it takes 2 a rank of the group,
// and the rank, modulo their number, that sums its first slice; by these its bits are the same whatever it travels
// with. `projection` is P's codec. When the Work ends each state's done() tells whether the result is finite, and the
// caller commits or rolls back. ValueError or TypeError before anything is sent: tensors, op, codecs (they have
// nonfinite=poison) or states that will not do. Called inside Coalescing::run().
WorkPtr issueLowRankAllReduce(GroupParts& parts, const Tensors& tensors, const c10d::ReduceOp& op,
                              const CodecSpec& codec, const CodecSpec& projection,
                              const std::vector<std::shared_ptr<Compression>>& states,
                              const std::vector<uint64_t>& slots, const std::vector<uint32_t>& owners, uint32_t step);

}  // namespace lowcomm

#pragma once

#include "backend/group_parts.h"

namespace lowcomm {

// broadcast and gather, encoded or exact, where the policy names them, else the inner backend's. Arguments and results
// are c10d's. Called inside Coalescing::run().
WorkPtr issueBroadcast(GroupParts& parts, Tensors& tensors, const c10d::BroadcastOptions& opts);
WorkPtr issueGather(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts);

}  // namespace lowcomm

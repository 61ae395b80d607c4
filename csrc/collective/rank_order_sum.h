#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/context.h"
#include "collective/contributions.h"
#include "collective/plan.h"

namespace lowcomm {

// Reduces one run of the slice that this rank owns, in rank order, into `out`: run.count elements of `dtype`, which may
// be where `contributions` finds its own. `payloads`: by rank, those of the run; this rank's own is empty. Exact
// elements are reduced in their own type (fp16 and bf16 in fp32), a codec's are decoded into an fp32 sum; an average is
// divided once, after the sum. Bytes that do not decode are attributed to their sender.
void sumInRankOrder(OpContext& op, Contributions& contributions, const Run& run,
                    const std::vector<std::span<const std::byte>>& payloads, std::byte* out, DType dtype,
                    const Reduction& reduction);

}  // namespace lowcomm

// barrier and monitored_barrier.
#include <memory>
#include <utility>

#include "backend/collectives.h"
#include "collective/collectives.h"
#include "tensor/op_buffers.h"

namespace lowcomm {

WorkPtr issueBarrier(GroupParts& parts) {
  parts.group.expectLiving("barrier");
  // Behind all ops of the queue, as it is one of them. Not behind exact ops that NCCL carries: their streams order
  // those, and ProcessGroupNCCL::waitForPendingWorks() looks every 100 ms.
  auto buffers = std::make_shared<OpBuffers>();
  buffers->run = [](OpContext& context) { barrier(context); };
  const uint64_t sequence = ++parts.group.sequence;
  return parts.issuer.submit({c10d::OpType::BARRIER, "barrier", sequence, /*exact=*/true}, {}, {}, nullptr,
                             std::move(buffers));
}

void runMonitoredBarrier(GroupParts& parts, const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  constexpr const char* kOp = "monitored_barrier";
  parts.blocks.startPutOff();
  parts.inner.waitForAll();
  parts.group.expectLiving(kOp);
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? parts.group.options->timeout : opts.timeout;
  parts.issuer.runAndWait(kOp, parts.blocks.takeNumbers(1), [timeout, wait_all_ranks](OpContext& context) {
    monitoredBarrier(context, timeout, wait_all_ranks);
  });
}

}  // namespace lowcomm

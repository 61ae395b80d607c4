#pragma once

#include <deque>
#include <vector>

#include "collective/contributions.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"

namespace lowcomm {

// The reduction of some tensors as one exchange. Tensor(op, given..., message, reduction) is one of them: described(),
// rawBytes(), add(exchange) its phases, and wait() where there is something left when all frames are through.
template <class Tensor, class Message, class... Given>
void reduceTensors(OpContext& op, const std::vector<Message>& messages, const Reduction& reduction, Given&... given) {
  std::deque<Tensor> tensors;
  std::vector<MessageSummary> described;
  Exchange exchange;
  for (const Message& message : messages) {
    Tensor& tensor = tensors.emplace_back(op, given..., message, reduction);
    described.push_back(tensor.described());
    op.counters.raw_bytes += tensor.rawBytes();
    tensor.add(exchange);
  }
  exchange.description = describeReduction(op.op, described, reduction);
  runExchange(op, exchange);
  if constexpr (requires(Tensor& tensor) { tensor.wait(); }) {
    for (Tensor& tensor : tensors)
      tensor.wait();
  }
}

}  // namespace lowcomm

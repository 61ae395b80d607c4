// all_reduce of matrices by low-rank factors, W ranks; p and r are the bytes of all encoded factors P and R:
//   1. Every rank forms its P = A·Q of each matrix; an all_reduce sums them, and tensors that are no matrices with
//   them:
//      2(W - 1)/W·p bytes out and in, and those of the other tensors.
//   2. Every rank orthonormalises the sum P in a fixed order: no bytes.
//   3. It forms R = Aᵀ·P; an all_reduce sums them, with a sequence number of its own: 2(W - 1)/W·r bytes out and in.
//   4. It writes P·Rᵀ to the tensors, the loss to the residuals, and R to the factors Q: no bytes.

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/float_env.h"
#include "collective/all_reduce.h"
#include "collective/low_rank_tensor.h"
#include "collective/op_context.h"
#include "collective/summer.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

bool holdsElements(const AllReduceMessage& message) {
  return std::any_of(message.tensors.begin(), message.tensors.end(),
                     [](const ReduceTensor& t) { return t.elements > 0; });
}

// Bytes that the tensors take uncoded: each element goes to a rank once, and once from there to all.
uint64_t rawBytes(const LowRankMessage& message, int ranks) {
  uint64_t elements = 0;
  for (const LowRankTensor& tensor : message.tensors)
    elements += tensor.elements;
  return 2 * (ranks - 1) * elements * itemBytes(message.dtype) / ranks;
}

}  // namespace

bool lowRankAllReduce(OpContext& op, const LowRankMessage& message, const Reduction& reduction) {
  if (reduction.premultiplied) {
    throw ValueError(op.op + ", compressed: expected a sum or an average, got premul_sum");
  }
  const LowRankKernels& kernels = *lowcomm::kernels().low_rank;
  const int ranks = op.size();
  std::vector<float> whole;
  std::deque<TensorCompression> tensors;
  for (const LowRankTensor& tensor : message.tensors)
    tensors.emplace_back(tensor, message.dtype, whole);

  // A message has one type and one codec: where P's are others than the tensors' next to it, it is a message of its
  // own.
  AllReduceMessage elements(message.codec, message.dtype, message.draws);
  AllReduceMessage projections(message.projection, DType::float32, message.draws);
  AllReduceMessage backs(message.codec, DType::float32, message.draws);
  const bool apart = message.dtype != DType::float32 || message.projection != message.codec;
  {
    Stopwatch watch(op, Doing::encode);
    FloatEnv env;
    for (TensorCompression& tensor : tensors)
      tensor.share(apart && tensor.lowRank() ? projections : elements, kernels);
  }
  std::vector<AllReduceMessage> messages;
  std::shared_ptr<CodedSums> sums;
  if (std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return !t.lowRank() && !t.tensor().data; }))
    elements.sums = &sums;
  if (holdsElements(elements)) messages.push_back(std::move(elements));
  if (holdsElements(projections)) messages.push_back(std::move(projections));
  allReduce(op, messages, reduction);

  bool finite = !sums || sums->finite(), low_rank = false;
  for (TensorCompression& tensor : tensors) {
    low_rank |= tensor.lowRank();
    finite = finite && tensor.firstIsFinite();
  }
  if (finite && low_rank) {
    ++op.sequence;
    {
      Stopwatch watch(op, Doing::encode);
      FloatEnv env;
      for (TensorCompression& tensor : tensors) {
        if (tensor.lowRank()) tensor.shareBack(backs, kernels, ranks);
      }
    }
    messages = {std::move(backs)};
    allReduce(op, messages, reduction);
    for (const TensorCompression& tensor : tensors)
      finite = finite && tensor.secondIsFinite();
  }
  Stopwatch watch(op, Doing::decode);
  FloatEnv env;
  for (TensorCompression& tensor : tensors) {
    const auto rounder = static_cast<int>(tensor.tensor().first_owner % static_cast<uint32_t>(ranks));
    if (finite) {
      tensor.finish(kernels, rounder == op.rank(), reduction.average ? static_cast<float>(ranks) : 1.0f);
    } else {
      tensor.spoil();
    }
  }
  if (message.average) {
    message.average->sums = sums;
    message.average->tensors.clear();
    for (TensorCompression& tensor : tensors)
      message.average->tensors.push_back(tensor.reduced());
  }
  op.counters.raw_bytes = rawBytes(message, ranks);
  return finite;
}

}  // namespace lowcomm

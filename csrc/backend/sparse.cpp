// all_reduce of a sparse tensor in host memory:
//   1. Ranks tell each other how many elements their coalesced tensors have.
//   2. They gather each other's indices and values, in one exchange.
//   3. Each concatenates them in rank order and coalesces: all have the same bits.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/collectives.h"
#include "backend/reduction.h"
#include "collective/collectives.h"
#include "collective/op_context.h"
#include "tensor/errors.h"
#include "tensor/op_buffers.h"
#include "tensor/python_state.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

constexpr const char* kOp = "all_reduce";

// A tensor of every rank, of as many elements as each says.
GatherMessage gatherOf(const at::Tensor& mine, const Tensors& all, const std::string& type_name,
                       const std::string& type_elements) {
  GatherMessage message;
  message.dtype = DType::opaque;
  message.type_name = type_name;
  message.type_elements = type_elements;
  message.input = mine.const_data_ptr();
  for (const at::Tensor& tensor : all) {
    message.layouts.push_back(Layout::single(tensor.nbytes(), CodecSpec{}));
    message.outputs.push_back(tensor.mutable_data_ptr());
  }
  return message;
}

at::Tensor sumOfRanks(OpContext& op, const at::Tensor& mine) {
  const auto ranks = static_cast<size_t>(op.size());
  const std::string type = std::string("sparse ") + c10::toString(mine.scalar_type());
  const std::string shape = c10::str(mine.sizes(), ", ", mine.sparse_dim(), " sparse dimensions");
  const at::Tensor indices = mine._indices().contiguous(), values = mine._values().contiguous();
  const at::Tensor count = at::full({1}, mine._nnz(), at::kLong);
  const Tensors counts = at::empty({op.size(), 1}, at::kLong).unbind();
  allGather(op, {gatherOf(count, counts, type, shape)});

  int64_t most = 1;  // elements that a coalesced tensor can have
  for (int64_t dimension = 0; dimension < mine.sparse_dim(); ++dimension)
    most *= mine.size(dimension);
  Tensors all_indices(ranks), all_values(ranks);
  std::vector<int64_t> block = values.sizes().vec();
  for (size_t rank = 0; rank < ranks; ++rank) {
    const int64_t n = counts[rank].item<int64_t>();
    TORCH_CHECK_WITH(DistBackendError, n >= 0 && n <= most, "lowcomm: all_reduce of a sparse tensor: rank ", rank,
                     ": expected 0 ... ", most, " elements, got ", n);
    block[0] = n;
    all_indices[rank] = at::empty({indices.size(0), n}, indices.options());
    all_values[rank] = at::empty(block, values.options());
  }
  allGather(op, {gatherOf(indices, all_indices, "indices", shape), gatherOf(values, all_values, type, shape)});
  return at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values), mine.sizes(), mine.options()).coalesce();
}

}  // namespace

WorkPtr issueAllReduceSparse(GroupParts& parts, Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const bool own = tensors.size() == 1 && tensors[0].device().is_cpu() && tensors[0].layout() == at::kSparse;
  if (!own) {
    return parts.inner.issue(
        {c10d::OpType::_ALLREDUCE_SPARSE, kOp, tensors, tensors},
        [tensors, opts](c10d::Backend& inner) mutable { return inner.allreduce_sparse(tensors, opts); });
  }
  parts.group.expectLiving(kOp);
  TORCH_CHECK_VALUE(opts.reduceOp == c10d::ReduceOp::SUM, "lowcomm: all_reduce of a sparse tensor: expected SUM, got ",
                    reduceOpName(opts.reduceOp));
  auto buffers = std::make_shared<OpBuffers>();
  const uint64_t sequence = ++parts.group.sequence;  // of both exchanges
  NoPythonObjects guard;
  buffers->run = [tensor = tensors[0], state = std::make_shared<at::ThreadLocalState>()](OpContext& context) {
    at::ThreadLocalStateGuard restored(*state);  // an inference tensor is written in inference mode alone
    at::NoGradGuard no_grad;
    at::Tensor out = tensor;
    out.copy_(sumOfRanks(context, tensor.coalesce()));
  };
  return parts.issuer.submit({c10d::OpType::ALLREDUCE, kOp, sequence, /*exact=*/true}, tensors, tensors, nullptr,
                             std::move(buffers));
}

}  // namespace lowcomm

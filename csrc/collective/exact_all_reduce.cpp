#include "collective/exact_all_reduce.h"

#include "codec/spec.h"
#include "collective/all_gather.h"
#include "collective/reduce_scatter.h"
#include "collective/slices.h"
#include "wire/layout.h"

namespace lowcomm {

void exactAllReduce(OpContext& op, const std::vector<ExactTensor>& tensors, const Reduction& reduction) {
  const int ranks = op.group.size(), rank = op.group.rank();
  std::vector<ScatterMessage> scatters;
  std::vector<GatherMessage> gathers;
  for (const ExactTensor& tensor : tensors) {
    ScatterMessage scatter{.dtype = DType::float32};
    GatherMessage gather{.dtype = DType::float32};
    for (const Slice& slice : slicesOf(tensor.elements, CodecSpec{}, ranks)) {
      scatter.layouts.push_back(Layout::single(slice.count, CodecSpec{}));
      scatter.inputs.push_back(tensor.data + slice.first);
      gather.outputs.push_back(tensor.data + slice.first);
    }
    gather.layouts = scatter.layouts;
    scatter.output = gather.outputs[rank];
    gather.input = scatter.output;
    scatters.push_back(std::move(scatter));
    gathers.push_back(std::move(gather));
  }
  reduceScatter(op, scatters, reduction);
  ++op.sequence;
  allGather(op, gathers);
}

}  // namespace lowcomm

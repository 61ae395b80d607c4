#include "tensor/op_checks.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <cstddef>

namespace lowcomm {

void checkOutput(const char* op, const at::Tensor& output) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(output) != at::MemOverlap::Yes, "lowcomm: ", op,
                    ": expected an output without elements that share memory, got shape ", output.sizes(),
                    " with strides ", output.strides());
}

void checkOutputs(const char* op, const std::vector<at::Tensor>& outputs) {
  std::vector<const at::Tensor*> by_address;
  for (const auto& output : outputs) {
    if (!output.defined() || output.layout() != at::kStrided || output.numel() == 0) continue;
    checkOutput(op, output);
    if (output.is_non_overlapping_and_dense()) by_address.push_back(&output);
  }
  const auto begin = [](const at::Tensor* output) { return static_cast<const std::byte*>(output->const_data_ptr()); };
  std::sort(by_address.begin(), by_address.end(),
            [&](const at::Tensor* a, const at::Tensor* b) { return begin(a) < begin(b); });
  for (size_t i = 1; i < by_address.size(); ++i) {
    const at::Tensor *a = by_address[i - 1], *b = by_address[i];
    TORCH_CHECK_VALUE(a->device() != b->device() || begin(a) + a->nbytes() <= begin(b), "lowcomm: ", op,
                      ": expected outputs that share no memory, got two of shapes ", a->sizes(), " and ", b->sizes(),
                      " that do");
  }
}

void checkCoded(const Layout& layout, at::ScalarType type) {
  TORCH_CHECK_TYPE(!layout.coded() || type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
                   "lowcomm: a layout with codecs: expected float32, float16 or bfloat16, got ", type);
}

}  // namespace lowcomm

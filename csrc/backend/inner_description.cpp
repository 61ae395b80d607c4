// Ops that the policy names and that only the inner backend can serve: sparse tensors, or reductions and types that
// lowcomm has no loop for. Other ranks may code the same op on lowcomm's lane, where nobody would join them.
#include <ATen/ATen.h>

#include "backend/backend.h"
#include "collective/message_summary.h"
#include "tensor/wire_elements.h"

namespace lowcomm {
namespace {

MessageSummary describedTensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return {"undefined", "0"};
  const DType dtype = wireType(tensor.scalar_type());
  std::string type = dtype == DType::opaque ? c10::toString(tensor.scalar_type()) : dtypeName(dtype);
  if (tensor.layout() != at::kStrided) type += std::string(" ") + c10::str(tensor.layout());
  return {type, std::to_string(tensor.numel())};
}

}  // namespace

std::optional<KeyValues> LowcommBackend::describeForInner(
    const std::string& op, const Tensors& tensors, const std::vector<std::pair<std::string, std::string>>& more) const {
  if (!named(op) || size_ == 1) return std::nullopt;
  std::vector<MessageSummary> described;
  for (const auto& tensor : tensors)
    described.push_back(describedTensor(tensor));
  KeyValues description = describe(op, described);
  description.fields.insert(std::prev(description.fields.end()), more.begin(), more.end());
  return description;
}

}  // namespace lowcomm

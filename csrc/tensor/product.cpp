#include "tensor/product.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

namespace lowcomm {
namespace {

// Below this, a call costs more than it saves; and each new shape is compiled, which those of single tokens are not
// worth.
constexpr int64_t kLeastRows = 32;
constexpr int64_t kLeastProducts = int64_t{1} << 20;

// Returns null unless torch has it with these arguments: an operation of torch's compiler, whose name no version
// promises.
const c10::OperatorHandle* linear() {
#if defined(__x86_64__)
  static const std::optional<c10::OperatorHandle> kFound = [] {
    auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (found && (found->schema().arguments().size() != 6 || !at::globalContext().hasMKLDNN())) found.reset();
    return found;
  }();
  return kFound && at::globalContext().userEnabledMkldnn() ? &*kFound : nullptr;
#else
  return nullptr;
#endif
}

bool suits(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat && a.size(0) >= kLeastRows &&
         a.size(0) * a.size(1) * b.size(1) >= kLeastProducts;
}

}  // namespace

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  const c10::OperatorHandle* const op = suits(a, b) ? linear() : nullptr;
  if (op == nullptr) return at::mm(a, b);
  // a, the transposed weights, bias, what follows, its numbers, its algorithm.
  c10::Stack stack;
  stack.emplace_back(a.contiguous());
  stack.emplace_back(b.t());
  stack.emplace_back();
  stack.emplace_back(std::string("none"));
  stack.emplace_back(c10::List<std::optional<at::Scalar>>());
  stack.emplace_back(std::string());
  op->callBoxed(stack);
  return stack.back().toTensor();
}

}  // namespace lowcomm

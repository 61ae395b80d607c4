#include "diloco/outer_tensor.h"

#include <cstring>
#include <utility>

#include "collective/all_reduce.h"
#include "kernels/isa/table.h"
#include "kernels/reduce.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

bool isFactored(const at::Tensor& tensor, int64_t rank) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0), columns = rows == 0 ? 0 : tensor.numel() / rows;
  return rank > 0 && tensor.dim() >= 2 && rank < rows && rank < columns && isLowRank(rows, columns, rank);
}

bool isHalf(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

}  // namespace

float* dataAt(const at::Tensor& tensor, int64_t first) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() + first : nullptr;
}

void copyElements(float* to, const float* from, int64_t count) {
  if (to != from) std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}

OuterTensor::OuterTensor(OuterParameter of, const at::Tensor& wide, const DiLoCoXOptions& options)
    : parameter(std::move(of)), outer(wide.clone()) {
  const at::Tensor& tensor = parameter.tensor;
  const bool narrow = tensor.scalar_type() != at::kFloat, delayed = options.mode != OuterMode::sync;
  if (options.momentum > 0) momentum = at::zeros_like(outer);
  if (options.isExact()) message = at::zeros_like(outer);
  if (options.isExact() ? delayed && !narrow : delayed || narrow) start = at::zeros_like(outer);
  if (narrow) rounding = at::zeros_like(outer);
  if (narrow && delayed) mark = at::zeros_like(outer, isHalf(tensor.scalar_type()) ? tensor.scalar_type() : at::kFloat);
  if (options.isExact()) return;
  first_rank = isFactored(tensor, options.rank) ? options.rank : 0;
  compression = std::make_shared<Compression>(tensor.sizes(), first_rank, options.error_feedback, options.eight_bits,
                                              options.seed + parameter.number);
}

OuterSpan OuterTensor::span(const at::Tensor& host, int64_t first, int64_t count) const {
  return {dataAt(host, first),     dataAt(outer, first),      dataAt(momentum, first), nullptr, nullptr,
          dataAt(rounding, first), static_cast<size_t>(count)};
}

bool OuterTensor::holdsDelta(const OuterLayout& layout) const {
  return layout.start_is_delta || (rounding.defined() && !layout.exact);
}

float* OuterTensor::markOf(const OuterLayout& layout, int64_t first, int64_t count, float* scratch) const {
  const auto n = static_cast<uint64_t>(count);
  if (rounding.defined()) {
    if (mark.scalar_type() == at::kFloat) return dataAt(mark, first);
    const auto* narrow = static_cast<const uint16_t*>(mark.const_data_ptr()) + first;
    reduceAssign(scratch, narrow, wireType(mark.scalar_type()), n);
  } else if (layout.mark_is_outer) {
    copyElements(scratch, dataAt(outer, first), count);
  } else if (!layout.start_is_delta) {
    return dataAt(start, first);
  } else if (layout.mark_is_apart) {
    return dataAt(mark, first);
  } else {
    kernels().difference(scratch, dataAt(outer, first), dataAt(start, first), n);
  }
  return scratch;
}

float* OuterTensor::markApart(const OuterLayout& layout, int64_t first, int64_t count, float* scratch) const {
  float* at = markOf(layout, first, count, scratch);
  if (holdsDelta(layout)) return at;
  copyElements(scratch, at, count);
  takeDelta(layout, dataAt(start, first), first, count);
  return scratch;
}

void OuterTensor::takeDelta(const OuterLayout& layout, float* delta, int64_t first, int64_t count) const {
  float* kept = dataAt(start, first);
  if (holdsDelta(layout)) {
    copyElements(delta, kept, count);
  } else {
    kernels().difference(delta, dataAt(outer, first), kept, static_cast<uint64_t>(count));
  }
}

void OuterTensor::eachKept(const std::function<void(const std::string&, const at::Tensor&)>& f) const {
  const std::pair<std::string, at::Tensor> kept[] = {{parameter.name + ".outer", outer},
                                                     {parameter.name + ".momentum", momentum},
                                                     {"own." + parameter.name + ".rounding", rounding}};
  for (const auto& [key, tensor] : kept) {
    if (tensor.defined()) f(key, tensor);
  }
}

OuterMemory OuterTensor::memory() const {
  const auto bytes = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.nbytes() : 0; };
  return {bytes(outer),   bytes(momentum), bytes(start),
          bytes(mark),    bytes(message),  compression ? compression->bytes() : 0,
          bytes(rounding)};
}

}  // namespace lowcomm

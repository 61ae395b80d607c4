#include "diloco/fragment.h"

#include <algorithm>

#include <c10/core/GradMode.h>

#include "base/error.h"
#include "base/hashes.h"
#include "collective/all_reduce.h"
#include "kernels/low_rank/low_rank.h"
#include "tensor/host_parameters.h"

namespace lowcomm {
namespace {

constexpr const char* kOp = "outer_step";

int64_t rowsOf(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? 1 : tensor.size(0);
}

bool factored(const at::Tensor& tensor, int64_t rank) {
  const int64_t rows = rowsOf(tensor), columns = rows == 0 ? 0 : tensor.numel() / rows;
  return rank > 0 && tensor.dim() >= 2 && rank < rows && rank < columns && isLowRank(rows, columns, rank);
}

bool isHalf(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

}  // namespace

Fragment::Fragment(const DiLoCoXOptions& options, std::vector<OuterParameter> parameters)
    : options_(options), next_rank_(options.rank) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (const OuterParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    if (!tensor.is_floating_point() || tensor.layout() != at::kStrided) {
      throw TypeError("DiLoCoX: " + parameter.name + ": expected a dense floating-point tensor, got " +
                      std::string(tensor.toString()));
    }
    tensors.push_back(tensor);
  }
  const HostParameters hosts(std::move(tensors));
  for (size_t i = 0; i < parameters.size(); ++i) {
    OuterParameter& parameter = parameters[i];
    const at::Tensor& tensor = parameter.tensor;
    ParameterState kept;
    if (tensor.numel() == 0) continue;  // this rank's shard of a small parameter
    kept.outer = hosts.wide(i).clone();
    const bool narrow = tensor.scalar_type() != at::kFloat, delayed = options.mode != OuterMode::sync;
    if (options.momentum > 0) kept.momentum = at::zeros_like(kept.outer);
    if (isExact()) kept.message = at::zeros_like(kept.outer);
    if (isExact() ? delayed && !narrow : delayed || narrow) kept.start = at::zeros_like(kept.outer);
    if (narrow) kept.rounding = at::zeros_like(kept.outer);
    if (narrow && delayed)
      kept.mark = at::zeros_like(kept.outer, isHalf(tensor.scalar_type()) ? tensor.scalar_type() : at::kFloat);
    if (options.codec.id != CodecId::none) {
      kept.first_rank = factored(tensor, options.rank) ? options.rank : 0;
      kept.compression =
          std::make_shared<Compression>(tensor.sizes(), kept.first_rank, options.error_feedback, options.eight_bits,
                                        options.seed + parameter.number);
    }
    kept.parameter = std::move(parameter);
    kept_.push_back(std::move(kept));
  }
  measure();
}

int64_t Fragment::elements() const {
  int64_t elements = 0;
  for (const ParameterState& kept : kept_)
    elements += kept.outer.numel();
  return elements;
}

// Where the pseudo-gradient of a coded message is.
Elsewhere Fragment::elsewhere(OuterMessage& flight, size_t i, const std::vector<at::Tensor>& parameters) const {
  const ParameterState& kept = kept_[i];
  if (!kept.start.defined()) return flight.difference(kept.outer, parameters[i]);
  return holdsDelta(kept) ? flight.from(kept.start) : flight.difference(kept.outer, kept.start);
}

void Fragment::queue(OpQueue& queue, uint32_t step, double weight, const std::vector<at::Tensor>& parameters) {
  const CodecSpec codec = poisoning(options_.codec);
  auto flight = std::make_shared<OuterMessage>();
  flight->weight = weight;
  flight->energies.resize(kept_.size());
  flight->coded = {DType::float32,
                   codec,
                   options_.projection.id == CodecId::none ? codec : poisoning(options_.projection),
                   // Not by the group's key: replicas of one cluster average in groups of their own, to the same bits.
                   {options_.seed, streamOf(queue.rank(), 0), step},
                   {},
                   in_place_ ? nullptr : &flight->average};
  for (size_t i = 0; i < kept_.size(); ++i) {
    ParameterState& kept = kept_[i];
    if (!in_place_) kept.message = at::Tensor();
    const ReduceTensor whole =
        in_place_ ? flight->inPlace(kept.message) : ReduceTensor{static_cast<uint64_t>(kept.outer.numel())};
    if (isExact()) {
      flight->exact.push_back({whole.elements, CodecSpec{}, DType::float32, whole.data});
      continue;
    }
    Compression& compression = *kept.compression;
    if (kept.first_rank > 0) compression.setRank(std::min(next_rank_, kept.first_rank));
    flight->compressions.push_back(kept.compression);
    LowRankTensor tensor{whole.data, whole.elements};
    if (!in_place_) tensor.elsewhere = elsewhere(*flight, i, parameters);
    const Compression::StateView lent = compression.begin(kept.outer.numel());
    tensor.residual = lent.residual;
    tensor.kept = lent.kept;
    tensor.elsewhere.coded = lent.coded;
    tensor.elsewhere.in_residual =
        !in_place_ && kept.first_rank > 0 && lent.residual && options_.mode != OuterMode::sync;
    tensor.factor = lent.factor;
    tensor.rank = static_cast<uint64_t>(compression.rank());
    if (tensor.rank > 0) {
      tensor.rows = static_cast<uint64_t>(compression.rows());
      tensor.columns = static_cast<uint64_t>(compression.columns());
    }
    if (tensor.rank > 0 && (options_.adapt_rank || options_.adapt_sync_every)) {
      flight->energies[i].resize(tensor.rank);
      tensor.energies = flight->energies[i].data();
    }
    tensor.seed = compression.seed() + step;
    tensor.slot = kept.parameter.number * 2 * static_cast<uint64_t>(queue.size());
    tensor.first_owner = kept.parameter.number;
    flight->coded.tensors.push_back(tensor);
  }
  flight_ = flight;
  phase_ = Phase::flying;
  if (kept_.empty()) return;
  ticket_ = Ticket(queue, kOp, /*sequences=*/weight > 0 ? 3 : 2, [flight](OpContext& op) { flight->run(op); });
}

bool Fragment::endsWithin(std::chrono::milliseconds patience) const {
  return phase_ != Phase::flying || !ticket_.pending() || ticket_.endsWithin(patience);
}

void Fragment::wait() {
  if (phase_ != Phase::flying) return;
  waited_s_ = 0;
  const auto ended = [this](bool well) {
    for (const auto& compression : flight_->compressions)
      compression->end(well);
  };
  if (ticket_.pending()) {
    const auto start = std::chrono::steady_clock::now();
    try {
      moved_ = ticket_.wait();
    } catch (...) {
      ended(false);
      forget();
      throw;
    }
    waited_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  const bool finite = flight_->exact.empty() ? flight_->finite || kept_.empty() : flight_->inPlaceIsFinite();
  ended(finite);
  if (!finite) {
    forget();
    throw ValueError(std::string("DiLoCoX: expected finite pseudo-gradients, got NaN or infinity ") +
                     (finite_ ? "on another rank" : "on this rank") + "; the outer step was dropped on all ranks");
  }
  effective_ = {};
  for (size_t i = 0; i < flight_->energies.size(); ++i) {
    const std::vector<double>& energies = flight_->energies[i];
    const size_t rank = lowcomm::effectiveRank(energies.data(), energies.size(), Adaptation::kEnergy);
    if (rank == 0) continue;  // no matrix, or one that nobody moved
    effective_.sum += static_cast<double>(rank);
    ++effective_.matrices;
  }
  phase_ = Phase::landed;
  measure();
}

void Fragment::drop() {
  try {
    wait();
  } catch (...) {
    // Its state has rolled back already.
  }
  if (phase_ == Phase::landed) {
    for (const ParameterState& kept : kept_) {
      if (kept.compression && kept.compression->done()) kept.compression->rollBack();
    }
    forget();
  }
}

void Fragment::forget() {
  flight_.reset();
  phase_ = Phase::idle;
  for (ParameterState& kept : kept_) {
    if (!isExact()) kept.message = at::Tensor();
  }
}

void Fragment::measure() {
  memory_ = {};
  const auto bytes = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.nbytes() : 0; };
  for (const ParameterState& kept : kept_) {
    memory_ += {bytes(kept.outer),   bytes(kept.momentum),
                bytes(kept.start),   bytes(kept.mark),
                bytes(kept.message), kept.compression ? kept.compression->bytes() : 0,
                bytes(kept.rounding)};
  }
  if (flight_) memory_.average += flight_->average.bytes();
}

OuterMemory& OuterMemory::operator+=(const OuterMemory& more) {
  outer += more.outer;
  momentum += more.momentum;
  start += more.start;
  mark += more.mark;
  average += more.average;
  residual += more.residual;
  rounding += more.rounding;
  return *this;
}

uint32_t Fragment::checksum() const {
  uint32_t sum = 0;
  for (const ParameterState& kept : kept_)
    sum = crc32c(kept.outer.const_data_ptr(), kept.outer.nbytes(), sum);
  return sum;
}

void Fragment::each(const std::function<void(const OuterParameter&, const at::Tensor&)>& call) {
  for (const ParameterState& kept : kept_)
    call(kept.parameter, kept.outer);
}

}  // namespace lowcomm

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
    if (parameters[i].tensor.numel() == 0) continue;  // this rank's shard of a small parameter
    tensors_.emplace_back(std::move(parameters[i]), hosts.wide(i), options);
  }
  layout_.exact = options.isExact();
  measure();
}

// Where the pseudo-gradient of a coded message is.
Elsewhere Fragment::elsewhere(OuterMessage& flight, const OuterTensor& kept, const at::Tensor& parameter) const {
  if (!kept.start.defined()) return flight.difference(kept.outer, parameter);
  return kept.holdsDelta(layout_) ? flight.from(kept.start) : flight.difference(kept.outer, kept.start);
}

void Fragment::queue(OpQueue& queue, uint32_t step, double weight, const std::vector<at::Tensor>& parameters) {
  const CodecSpec codec = poisoning(options_.codec);
  auto flight = std::make_shared<OuterMessage>();
  flight->weight = weight;
  flight->energies.resize(tensors_.size());
  flight->coded = {DType::float32,
                   codec,
                   options_.projection.id == CodecId::none ? codec : poisoning(options_.projection),
                   // Not by the group's key: replicas of one cluster average in groups of their own, to the same bits.
                   {options_.seed, streamOf(queue.rank(), 0), step},
                   {},
                   layout_.in_place ? nullptr : &flight->average};
  for (size_t i = 0; i < tensors_.size(); ++i) {
    OuterTensor& kept = tensors_[i];
    if (!layout_.in_place) kept.message = at::Tensor();
    const ReduceTensor whole =
        layout_.in_place ? flight->inPlace(kept.message) : ReduceTensor{static_cast<uint64_t>(kept.outer.numel())};
    if (layout_.exact) {
      flight->exact.push_back({whole.elements, CodecSpec{}, DType::float32, whole.data});
      continue;
    }
    Compression& compression = *kept.compression;
    if (kept.first_rank > 0) compression.setRank(std::min(next_rank_, kept.first_rank));
    flight->compressions.push_back(kept.compression);
    LowRankTensor tensor{whole.data, whole.elements};
    if (!layout_.in_place)
      tensor.elsewhere = elsewhere(*flight, kept, parameters.empty() ? at::Tensor() : parameters[i]);
    const Compression::StateView lent = compression.begin(kept.outer.numel());
    tensor.residual = lent.residual;
    tensor.kept = lent.kept;
    tensor.elsewhere.coded = lent.coded;
    tensor.elsewhere.in_residual =
        !layout_.in_place && kept.first_rank > 0 && lent.residual && options_.mode != OuterMode::sync;
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
  if (tensors_.empty()) return;
  ticket_ = Ticket(queue, kOp, /*sequences=*/weight > 0 ? 3 : 2, [flight](OpContext& op) { flight->run(op); });
}

bool Fragment::endsWithin(std::chrono::milliseconds patience) const {
  return phase_ != Phase::flying || !ticket_.pending() || ticket_.endsWithin(patience);
}

void Fragment::wait() {
  if (phase_ != Phase::flying) return;
  last_.waited_s = 0;
  const auto ended = [this](bool well) {
    for (const auto& compression : flight_->compressions)
      compression->end(well);
  };
  if (ticket_.pending()) {
    const auto start = std::chrono::steady_clock::now();
    try {
      last_.moved = ticket_.wait();
    } catch (...) {
      ended(false);
      forget();
      throw;
    }
    last_.waited_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  const bool finite = flight_->exact.empty() ? flight_->finite || tensors_.empty() : flight_->inPlaceIsFinite();
  ended(finite);
  if (!finite) {
    forget();
    throw ValueError(std::string("DiLoCoX: expected finite pseudo-gradients, got NaN or infinity ") +
                     (finite_ ? "on another rank" : "on this rank") + "; the outer step was dropped on all ranks");
  }
  last_.effective = {};
  for (size_t i = 0; i < flight_->energies.size(); ++i) {
    const std::vector<double>& energies = flight_->energies[i];
    const size_t rank = lowcomm::effectiveRank(energies.data(), energies.size(), Adaptation::kEnergy);
    if (rank == 0) continue;  // no matrix, or one that nobody moved
    last_.effective.sum += static_cast<double>(rank);
    ++last_.effective.matrices;
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
    for (const OuterTensor& kept : tensors_) {
      if (kept.compression && kept.compression->done()) kept.compression->rollBack();
    }
    forget();
  }
}

// -> idle: drops the message.
void Fragment::forget() {
  flight_.reset();
  phase_ = Phase::idle;
  for (OuterTensor& kept : tensors_) {
    if (!layout_.exact) kept.message = at::Tensor();
  }
}

void Fragment::measure() {
  last_.memory = {};
  for (const OuterTensor& kept : tensors_)
    last_.memory += kept.memory();
  if (flight_) last_.memory.average += flight_->average.bytes();
}

uint32_t Fragment::checksum() const {
  uint32_t sum = 0;
  for (const OuterTensor& kept : tensors_)
    sum = crc32c(kept.outer.const_data_ptr(), kept.outer.nbytes(), sum);
  return sum;
}

void Fragment::each(const std::function<void(const OuterParameter&, const at::Tensor&)>& call) {
  for (const OuterTensor& kept : tensors_)
    call(kept.parameter, kept.outer);
}

}  // namespace lowcomm

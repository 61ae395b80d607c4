#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "diloco/diloco_options.h"
#include "diloco/outer_message.h"
#include "diloco/outer_parameter.h"
#include "engine/op_queue.h"
#include "tensor/compression.h"

namespace lowcomm {

using TensorMap = std::map<std::string, at::Tensor>;

// The effective ranks of matrices, added up, so that those of several ranks can be averaged.
struct EffectiveRanks {
  double sum = 0;
  double matrices = 0;

  double mean() const { return matrices == 0 ? 0 : sum / matrices; }
};

// Bytes of a rank's outer state, by what they hold.
struct OuterMemory {
  uint64_t outer = 0, momentum = 0, start = 0, mark = 0, average = 0, residual = 0, rounding = 0;

  uint64_t total() const { return outer + momentum + start + mark + average + residual + rounding; }
  OuterMemory& operator+=(const OuterMemory& more);
};

// Some of the parameters and all that an outer loop keeps of them, in host memory. 4 bytes an element of each unless
// said: θ̄ and momentum, equal on all ranks; with error feedback the residual, 1 byte in 8 bits; of parameters that are
// not fp32 what rounding added to them.
//
// While a message is under way these are needed besides: δ, which the codes are made of as they are sent; the mark; the
// average; and the residual as it will be, next to the one that a failed op falls back to. Of δ and mark one is kept,
// the start, and the other follows from it, to the bit: with δ = θ̄ − θ and mark = θ, δ is θ̄ − start; in mode
// continue training goes on from θ̄ − δ, which is the mark; in mode restart from θ̄. A coded average stays in its codes
// until the outer step (CodedAverage), and with them in the cache each element's. What does not follow is kept: the
// mark in mode restart with an alpha, and of 16-bit parameters, 2 bytes; the average, where it is exact or of a group
// of one rank, or loaded. Mode sync waits for the average, and takes δ from the parameters themselves.
//
// With factors and an fp32 residual the op itself decodes the average, into the memory of the residual as it will be,
// which the next op computes of δ, the residual as it was, and factors: the product of factors would take the thread
// that trains longer than all else. So start and that memory change places at an outer step.
//
// The caller sees to the order of calls and of ranks; one thread.
class Fragment {
 public:
  // idle: nothing under way; flying: a message is; landed: it has come and is not applied.
  enum class Phase { idle, flying, landed };

  // Takes θ̄ from the parameters, which are whole tensors here. `options` outlives this.
  Fragment(const DiLoCoXOptions& options, std::vector<OuterParameter> parameters);

  Phase phase() const { return phase_; }
  int64_t elements() const;

  // idle -> flying: forms the pseudo-gradient δ = θ̄ − θ, and queues the average of C(δ + residual). `marks`: whether
  // inner steps follow before it is applied. `weight`: this rank's part of the average is its weight over that of all
  // ranks; 0 on all: equal parts.
  void send(OpQueue& queue, uint32_t step, bool marks, double weight = 0);

  // flying -> landed: waits. Throws what the op threw, ValueError where the average is not finite; then it is idle, and
  // nothing else has changed.
  void wait();

  // Whether wait() would return at once, now or within this time.
  bool endsWithin(std::chrono::milliseconds patience) const;

  // landed -> idle: the outer step, and the parameters move.
  void apply(Move move);

  // landed -> flying: apply and send in one pass over memory, for a delay of the whole interval.
  void applyAndSend(OpQueue& queue, uint32_t step, double weight = 0);

  // -> idle: the message is dropped and its residual and factors roll back, once its op has ended, well or not.
  void drop();

  // The effective ranks of the matrices of the last average (Adaptation).
  const EffectiveRanks& effectiveRanks() const { return effective_; }

  // r of the matrices from the next message on, at most each one's first. landed or idle.
  void setRank(int64_t rank) { next_rank_ = rank; }

  // The bytes that the last message moved, and the seconds that wait() waited.
  const OpCounters& moved() const { return moved_; }
  double waited() const { return waited_s_; }

  // When the last average had come, which is when there is most; before the first message what there is.
  const OuterMemory& memory() const { return memory_; }

  // The parameters become θ̄.
  void restore();

  // CRC-32C of θ̄.
  uint32_t checksum() const;

  // Calls with every parameter and θ̄, of the same shape, fp32.
  void each(const std::function<void(const OuterParameter&, const at::Tensor& outer)>& call);

  // The tensors that another rank's fragment takes over, in host memory: θ̄, momentum and factors, of the rank last set;
  // idle. To be written in place, then share(): `behind` moves the parameters to the new θ̄. Or not, then unshare().
  std::vector<at::Tensor> shared();
  void share(bool behind);
  void unshare() { factors_.clear(); }

  // The contents of a checkpoint, under "<name>.…"; of this rank alone under "own.<name>.…". wait() first.
  TensorMap state() const;

  // Throws ValueError naming the tensor that is missing or of another shape or dtype.
  void check(const TensorMap& state) const;

  // Takes a state that check() has accepted; idle.
  void load(const TensorMap& state, Phase phase, const EffectiveRanks& effective);

 private:
  struct ParameterState {
    OuterParameter parameter;
    at::Tensor outer, momentum, start, mark, message, rounding;
    std::shared_ptr<Compression> compression;  // null: exact
    int64_t first_rank = 0;
  };
  enum class Start : uint8_t { mark, delta };
  template <class F>
  void pass(bool moves, F&& f);
  template <class F>
  static void eachTensor(const ParameterState& kept, F&& f);
  at::Tensor averageOf(size_t tensor) const;
  at::Tensor wholeMark(size_t tensor) const;
  bool isExact() const { return options_.codec.id == CodecId::none; }
  bool isMarked() const { return options_.mode != OuterMode::sync; }
  bool holdsDelta(const ParameterState& kept) const;
  float* markOf(const ParameterState& kept, int64_t first, int64_t count, float* scratch) const;
  void arrived(size_t tensor, const TakeElements& take) const;
  bool isInResidual(size_t tensor) const;
  bool swaps(size_t tensor) const;
  float* markApart(const ParameterState& kept, int64_t first, int64_t count, float* scratch) const;
  void takeDelta(const ParameterState& kept, float* delta, int64_t first, int64_t count) const;
  void commit(size_t tensor);
  void settle(size_t tensor) const;
  OuterSpan spanOf(const ParameterState& kept, const at::Tensor& host, int64_t first, int64_t count) const;
  void applyAverage(Move move);
  void queue(OpQueue& queue, uint32_t step, double weight, const std::vector<at::Tensor>& parameters);
  Elsewhere elsewhere(OuterMessage& flight, size_t tensor, const std::vector<at::Tensor>& parameters) const;
  void measure();

  // -> idle: drops the message.
  void forget();
  OuterRule rule() const;

  const DiLoCoXOptions& options_;
  std::vector<ParameterState> kept_;
  Phase phase_ = Phase::idle;
  Ticket ticket_;
  std::shared_ptr<OuterMessage> flight_;
  Start start_ = Start::mark;                            // what `start` holds
  bool mark_is_outer_ = false;                           // the mark of fp32 parameters is θ̄ ...
  bool mark_is_apart_ = false;                           // ... or stands in `mark`
  bool in_place_ = true;                                 // the average is in `message`, decoded
  std::vector<at::Tensor> factors_;                      // between shared() and share(); by tensor
  int ranks_ = 1;
  int64_t next_rank_;
  EffectiveRanks effective_;
  double waited_s_ = 0;
  bool finite_ = true;
  OpCounters moved_;
  OuterMemory memory_;
};

}  // namespace lowcomm

#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/op_queue.h"
#include "optim/diloco_options.h"
#include "optim/outer_parameter.h"
#include "tensor/compression.h"

namespace lowcomm {

using TensorMap = std::map<std::string, at::Tensor>;

// The effective ranks of matrices, added up, so that those of several ranks can be averaged.
struct EffectiveRanks {
  double sum = 0;
  double matrices = 0;

  double mean() const { return matrices == 0 ? 0 : sum / matrices; }
};

// Some of the parameters and all that an outer loop keeps of them: θ̄ and momentum, equal on all ranks; residuals,
// low-rank factors and the message under way. In host memory, 4 bytes an element each: θ̄; the message; with momentum
// u; with a delay the mark; of parameters that are not fp32 what rounding added to them; with error feedback the
// residual and a second one, for a failed op to be rolled back (of residuals in 8 bits, 1 byte each, only while a
// message is under way); with mode eager two more. The caller sees to the order of calls and of ranks; one thread.
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

  // landed -> idle: the outer step, and the parameters move.
  void apply(Move move);

  // landed -> flying: apply and send in one pass over memory, for a delay of the whole interval.
  void applyAndSend(OpQueue& queue, uint32_t step, double weight = 0);

  // -> idle: the message is dropped and its residual and factors roll back, once its op has ended, well or not.
  void drop();

  // Of the average that landed last: the effective ranks of its matrices (Adaptation).
  const EffectiveRanks& effectiveRanks() const { return effective_; }

  // r of the matrices from the next message on, at most each one's first. landed or idle.
  void setRank(int64_t rank) { next_rank_ = rank; }

  // Of the last message: what moved, and the seconds that wait() waited.
  const OpCounters& moved() const { return moved_; }
  double waited() const { return waited_s_; }

  // The parameters become θ̄.
  void restore();

  // CRC-32C of θ̄.
  uint32_t checksum() const;

  // Calls with every parameter and θ̄, of the same shape, fp32 in host memory.
  void each(const std::function<void(const OuterParameter&, const at::Tensor& outer)>& call);

  // The tensors that another rank's fragment takes over: θ̄, momentum and factors, of the rank last set; idle. To be
  // written in place, then share(): `behind` moves the parameters to the new θ̄.
  std::vector<at::Tensor> shared();
  void share(bool behind);

  // The contents of a checkpoint, under "<name>.…"; of this rank alone under "own.<name>.…". wait() first.
  TensorMap state() const;

  // Throws ValueError naming the tensor that is missing or of another shape or dtype.
  void check(const TensorMap& state) const;

  // Takes a state that check() has accepted; idle.
  void load(const TensorMap& state, Phase phase, const EffectiveRanks& effective);

 private:
  struct ParameterState {
    OuterParameter parameter;
    at::Tensor outer, momentum, message, mark, rounding, own_message, own_momentum;
    std::shared_ptr<Compression> compression;  // null: exact
    int64_t first_rank = 0;
  };
  struct OuterMessage;
  template <class F>
  void pass(F&& f);
  template <class K, class F>
  static void eachTensor(K& kept, F&& f);
  void queue(OpQueue& queue, uint32_t step, double weight);

  // -> idle: the message is none any more, and with mode eager the rank's own outer steps, which were taken for it and
  // may hold what made it fail, start from θ̄ and its momentum again.
  void forget();
  OuterRule rule() const;

  const DiLoCoXOptions& options_;
  std::vector<ParameterState> kept_;
  Phase phase_ = Phase::idle;
  Ticket ticket_;
  std::shared_ptr<OuterMessage> flight_;
  std::vector<at::Tensor> factors_;  // between shared() and share(); by tensor
  int ranks_ = 1;
  int64_t next_rank_;
  EffectiveRanks effective_;
  double waited_s_ = 0;
  bool finite_ = true;
  OpCounters moved_;
};

}  // namespace lowcomm

#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "diloco/diloco_options.h"
#include "diloco/outer_message.h"
#include "diloco/outer_tensor.h"
#include "engine/op_queue.h"

namespace lowcomm {

using TensorMap = std::map<std::string, at::Tensor>;

// The effective ranks of matrices, added up, so that those of several ranks can be averaged.
struct EffectiveRanks {
  double sum = 0;
  double matrices = 0;

  double mean() const { return matrices == 0 ? 0 : sum / matrices; }
};

// Figures of a fragment's last average, which the outer step reports.
struct LastAverage {
  EffectiveRanks effective;  // of its matrices (Adaptation)
  OpCounters moved;          // bytes
  double waited_s = 0;       // that wait() took
  OuterMemory memory;        // of the fragment when it had come, which is when there is most; at first what there is
};

// A part of the parameters, with the outer state that is kept for it (OuterTensor). One thread; the caller orders calls
// and ranks.
//
// Life of a message:  idle --send--> flying --wait--> landed --apply--> idle.   drop() returns to idle from any state.
// applyAndSend() goes from landed to flying in one pass over memory. If wait() throws, nothing has changed but the
// state, which is idle.
//
// A coded average stays in its codes until the outer step (CodedAverage), and is decoded there piece by piece, in the
// cache. With factors and an fp32 residual the op itself decodes it, into the memory of the next residual, which the
// next op computes of δ, the residual and the factors: multiplying the factors would take the training thread longer
// than all else. So the start and that memory change places at such an outer step.
class Fragment {
 public:
  // idle: nothing under way; flying: a message is; landed: it has come and is not applied.
  enum class Phase { idle, flying, landed };

  // Takes θ̄ from the parameters, which are whole tensors here. `options` outlives this.
  Fragment(const DiLoCoXOptions& options, std::vector<OuterParameter> parameters);

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

  // r of the matrices from the next message on, at most each one's first. landed or idle.
  void setRank(int64_t rank) { next_rank_ = rank; }

  const LastAverage& last() const { return last_; }

  // The parameters become θ̄, or θ̄ − δ with the pseudo-gradients δ of `trained`, which is not empty then.
  void restore(const std::vector<at::Tensor>& trained = {});

  // δ of every tensor, fp32; idle.
  std::vector<at::Tensor> pseudoGradients();

  // CRC-32C of θ̄.
  uint32_t checksum() const;

  // Calls with every parameter and θ̄, of the same shape, fp32.
  void each(const std::function<void(const OuterParameter&, const at::Tensor& outer)>& call);

  // The tensors that another rank's fragment takes over, in host memory: θ̄, momentum and factors, of the rank last set;
  // idle. To be written in place, then share(): `behind` moves the parameters as restore() does. Or not, then
  // unshare().
  std::vector<at::Tensor> shared();
  void share(bool behind, const std::vector<at::Tensor>& trained);
  void unshare() { factors_.clear(); }

  // The contents of a checkpoint, under "<name>.…"; of this rank alone under "own.<name>.…". wait() first.
  TensorMap state() const;

  // Throws ValueError naming the tensor that is missing or of another shape or dtype.
  void check(const TensorMap& state) const;

  // Takes a state that check() has accepted; idle.
  void load(const TensorMap& state, Phase phase, const EffectiveRanks& effective);

 private:
  template <class F>
  void pass(bool moves, F&& f);
  OuterRule rule() const;
  void queue(OpQueue& queue, uint32_t step, double weight, const std::vector<at::Tensor>& parameters);
  Elsewhere elsewhere(OuterMessage& flight, const OuterTensor& kept, const at::Tensor& parameter) const;
  void eachAveraged(size_t tensor, const TakeElements& take) const;
  bool isInResidual(size_t tensor) const;
  bool swaps(size_t tensor) const;
  void commit(size_t tensor);
  void leaveResidual(size_t tensor) const;
  at::Tensor averageOf(size_t tensor) const;
  at::Tensor wholeMark(const OuterTensor& kept) const;
  void forget();
  void measure();

  const DiLoCoXOptions& options_;
  std::vector<OuterTensor> tensors_;
  OuterLayout layout_;
  Phase phase_ = Phase::idle;
  Ticket ticket_;
  std::shared_ptr<OuterMessage> flight_;
  std::vector<at::Tensor> factors_;  // between shared() and share(); by tensor
  int ranks_ = 1;
  int64_t next_rank_;
  bool finite_ = true;  // the pseudo-gradient
  LastAverage last_;
};

}  // namespace lowcomm

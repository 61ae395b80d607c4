#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "diloco/fragment.h"
#include "engine/op_queue.h"

namespace lowcomm {

// The ranks of a stripe after they have met: those with the most outer steps, which have the same θ̄, and the others.
struct StripeRanks {
  std::vector<int> ahead, behind;

  bool isBehind(int rank) const;

  // Collective over the group: compares outer steps that are applied, and checksums of θ̄. Throws as runExchange.
  static StripeRanks compare(OpQueue& group, int64_t applied, uint32_t checksum);
};

// The groups that a rank has been in, one after another.
class GroupHistory {
 public:
  int64_t applied = 0;     // outer steps, in all groups
  bool formed = false;     // there is a group of this rank, or of another one of its site
  bool broke_off = false;  // the last group ended where an interval did: without the outer step of it

  // Records how the groups of this rank's stripes ended; names those that follow; says that all ranks have met in them.
  void leave();
  void join(const std::vector<std::shared_ptr<OpQueue>>& groups);
  void takePart() { taken_part_ = true; }

  // Drops the record, after this rank has taken the others' state over: its groups may have ended otherwise for them.
  void forget() { ended_.clear(); }

  // Whether what this rank has trained since its last outer step is in no average yet: of the messages that it had sent
  // in the last group of this stripe the ranks ahead have applied none, as that group ended with as many outer steps
  // applied there as here. Collective over `group`, the next one.
  bool isUncounted(size_t stripe, OpQueue& group, const StripeRanks& ranks) const;

 private:
  std::vector<uint32_t> epochs_, last_;  // of the groups, by stripe; of the last ones before that it took part in
  bool taken_part_ = false;
  std::vector<std::pair<uint32_t, int64_t>> ended_;  // epochs of groups, and `applied` when each ended
};

// A fragment of a stripe on its way from the ranks that are ahead, each tensor from another of them in turn, to all
// that are behind. A rank that gives goes on at once: its next op of the group comes after this one, and an error of
// this one ends the group. One thread.
class Handover {
 public:
  // Queues the op, which is collective over the group. `fragment` outlives this, and is idle.
  Handover(OpQueue& group, const StripeRanks& ranks, Fragment& fragment);

  // Whether this rank takes the fragment over, once op() has ended; else it gives what others take.
  bool takes() const { return takes_; }
  Ticket& op() { return op_; }

  // Ends it on a rank that gives or takes: writes what came to the fragment, and moves the parameters to it. `keeps`:
  // with what they were trained by here since the last outer step. Returns the bytes that were taken.
  uint64_t finish(bool keeps);

 private:
  using Parcels = std::vector<at::Tensor>;  // by the rank that they come from, fp32 in host memory of their own
  std::vector<int64_t> elements(int ranks) const;
  void copy(int from, bool out) const;

  Fragment& fragment_;
  std::vector<at::Tensor> tensors_;
  std::vector<int> sources_;  // of the tensors
  bool takes_;
  std::shared_ptr<Parcels> parcels_;  // of the op, too, which may end after the rank that gives has gone on
  Ticket op_;
};

}  // namespace lowcomm

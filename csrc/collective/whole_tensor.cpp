// Exact tensors of an all_reduce that travel whole (summer.h).
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "codec/float_codec.h"
#include "collective/context.h"
#include "collective/host_summer.h"
#include "collective/summer.h"
#include "kernels/reduce.h"

namespace lowcomm {
namespace {

class SendWhole final : public Phase {
 public:
  SendWhole(OpContext& op, const MessagePlan& plan, void* data, const Reduction& reduction)
      : op_(op), plan_(plan), data_(static_cast<std::byte*>(data)), reduction_(reduction) {
    if (!reduceSupports(plan.dtype, reduction.kind)) {
      throw TypeError(op.op + ": expected a dtype that " + reduceName(reduction.kind) + " takes, got " +
                      dtypeName(plan.dtype));
    }
    out.assign(op.size(), &plan_);
    in = out;
    same_to_all = true;
    const bool own_first = op.rank() == 0 || (op.rank() == 1 && reduceCommutes(reduction.kind));
    in_place_ = own_first && accumulatorType(plan.dtype) == plan.dtype;
    for (int rank = 0; rank < op.size(); ++rank) {
      if (!in_place_ || rank != op.rank()) terms_.push_back(rank);
    }
  }

  void encode(size_t k, int /*peer*/, std::span<std::byte> payload) override {
    size_t at = 0;
    for (const Run& run : plan_.frames[k].runs) {
      run.encode(payload.subspan(at, run.bytes), elementsOf(run), plan_.dtype, {});
      at += run.bytes;
    }
  }

  void absorb(size_t k, const Payloads& payloads) override {
    size_t at = 0;
    for (const Run& run : plan_.frames[k].runs) {
      std::byte* out = elementsOf(run);
      const size_t bytes = run.count * itemBytes(accumulatorType(plan_.dtype));
      std::byte* sum = in_place_ ? out : scratch(op_.group.accumulator, bytes);
      for (size_t i = 0; i < terms_.size(); ++i) {
        op_.attribute(terms_[i], [&] {
          const auto x = NoneCodec::elements(plan_.dtype, payloads[terms_[i]].subspan(at, run.bytes), run.count);
          if (i == 0 && !in_place_) return reduceAssign(sum, x.data(), plan_.dtype, run.count);
          if (i + 1 < terms_.size()) return reduceInto(sum, x.data(), plan_.dtype, reduction_.kind, run.count);
          reduceLast(out, sum, x.data(), plan_.dtype, reduction_.kind, run.count, reduction_.average ? op_.size() : 0);
        });
      }
      at += run.bytes;
    }
  }

 private:
  std::byte* elementsOf(const Run& run) const { return data_ + run.offset * itemBytes(plan_.dtype); }

  OpContext& op_;
  const MessagePlan& plan_;
  std::byte* const data_;
  const Reduction reduction_;
  bool in_place_;           // the tensor holds the first term, and becomes the sum
  std::vector<int> terms_;  // of these ranks, in this order
};

}  // namespace

// With two ranks, a whole tensor makes neither rank send more than slices would, and neither waits for the other's
// sums; with more ranks each sends at most kMoreBytes more.
bool travelsWhole(uint64_t bytes, int ranks) {
  constexpr uint64_t kWholeBytes = 64 << 10, kMoreBytes = 8 << 10;
  const auto size = static_cast<uint64_t>(ranks);
  return ranks == 2 || (ranks > 2 && bytes <= kWholeBytes && (size - 1) * (size - 2) * bytes <= size * kMoreBytes);
}

std::unique_ptr<Phase> sendWhole(OpContext& op, const MessagePlan& plan, void* data, const Reduction& reduction) {
  return std::make_unique<SendWhole>(op, plan, data, reduction);
}

}  // namespace lowcomm

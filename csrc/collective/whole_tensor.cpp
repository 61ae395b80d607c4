// Small exact tensors of an all_reduce, which travel whole (summer.h).
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

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
      std::byte* sum = scratch(op_.group.accumulator, run.count * itemBytes(accumulatorType(plan_.dtype)));
      for (int rank = 0; rank < op_.size(); ++rank) {
        op_.attribute(rank, [&] {
          const auto x = NoneCodec::elements(plan_.dtype, payloads[rank].subspan(at, run.bytes), run.count);
          rank == 0 ? reduceAssign(sum, x.data(), plan_.dtype, run.count)
                    : reduceInto(sum, x.data(), plan_.dtype, reduction_.kind, run.count);
        });
      }
      reduceFinish(elementsOf(run), sum, plan_.dtype, run.count, reduction_.average ? op_.size() : 0);
      at += run.bytes;
    }
  }

 private:
  std::byte* elementsOf(const Run& run) const { return data_ + run.offset * itemBytes(plan_.dtype); }

  OpContext& op_;
  const MessagePlan& plan_;
  std::byte* const data_;
  const Reduction reduction_;
};

}  // namespace

// Of two ranks neither sends more than by slices; of more ranks up to kMoreBytes.
bool travelsWhole(uint64_t bytes, int ranks) {
  constexpr uint64_t kWholeBytes = 64 << 10, kMoreBytes = 8 << 10;
  const auto size = static_cast<uint64_t>(ranks);
  return ranks > 1 && bytes <= kWholeBytes && (size - 1) * (size - 2) * bytes <= size * kMoreBytes;
}

std::unique_ptr<Phase> sendWhole(OpContext& op, const MessagePlan& plan, void* data, const Reduction& reduction) {
  return std::make_unique<SendWhole>(op, plan, data, reduction);
}

}  // namespace lowcomm

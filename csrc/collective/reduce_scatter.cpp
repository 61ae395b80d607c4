#include "collective/reduce_scatter.h"

#include <cstddef>
#include <deque>
#include <iterator>
#include <span>

#include "codec/none.h"
#include "collective/describe.h"
#include "collective/exchange.h"
#include "collective/rank_plans.h"
#include "collective/reduce_tensors.h"

namespace lowcomm {
namespace {

// One tensor: what to send, and the accumulation of what comes.
class Scattering {
 public:
  Scattering(OpContext& op, const ScatterMessage& message, const Reduction& reduction)
      : op_(op),
        message_(message),
        reduction_(reduction),
        slices_(message.layouts, message.dtype, op.group.chunk_bytes, op.group.size()),
        contributions_(op, slices_, message.dtype, message.inputs, reduction, message.draws) {}

  Described described() const { return slices_.described(); }

  uint64_t rawBytes() const { return slices_.rawBytesToPeers(op_.group.rank()); }

  void add(Exchange& exchange) {
    Phase& phase = exchange.phases.emplace_back();
    phase.out = slices_.all();
    phase.in.assign(op_.group.size(), &slices_.of(op_.group.rank()));
    phase.check = [this](size_t k) { contributions_.checkOwn(k); };
    phase.encode = [this](size_t k, int peer, std::span<std::byte> payload) {
      contributions_.encode(k, peer, payload);
    };
    phase.absorb = [this](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      contributions_.whole(k, payloads, [this](const Run& run, const auto& whole) { reduce(run, whole); });
    };
  }

 private:
  void reduce(const Run& run, const std::vector<std::span<const std::byte>>& payloads) {
    const DType dtype = message_.dtype;
    std::byte* out = static_cast<std::byte*>(message_.output) + run.at * itemBytes(dtype);
    const void* own = contributions_.own(run);
    // Where the result stands, if it has the type of the sum and is not read when something has been written there.
    const bool direct = accumulatorType(dtype) == dtype && (own != out || op_.group.rank() == 0);
    std::byte* sum = direct ? out : scratch(op_.group.accumulator, run.count * itemBytes(accumulatorType(dtype)));
    for (int rank = 0; rank < op_.group.size(); ++rank) {
      if (rank == op_.group.rank()) {
        add(sum, own, run.count, rank == 0);
      } else {
        op_.blame(rank, [&] { addReceived(sum, run, payloads[rank], rank == 0); });
      }
    }
    reduceFinish(out, sum, dtype, run.count, reduction_.average ? op_.group.size() : 0);
  }

  void add(void* sum, const void* x, uint64_t count, bool first) {
    if (first) {
      reduceAssign(sum, x, message_.dtype, count);
    } else {
      reduceInto(sum, x, message_.dtype, reduction_.kind, count);
    }
  }

  // Exact elements are reduced where they stand, in their own type; a codec's are decoded into the fp32 sum.
  void addReceived(std::byte* sum, const Run& run, std::span<const std::byte> payload, bool first) {
    const DType dtype = message_.dtype;
    float* decoded = reinterpret_cast<float*>(sum);
    if (run.codec->spec().id == CodecId::none) {
      add(sum, NoneCodec::elements(dtype, payload, run.count).data(), run.count, first);
    } else if (first) {
      run.codec->decode(decoded, DType::float32, payload, run.offset, run.count);
    } else {
      run.codec->decodeAdd(decoded, dtype, payload, run.offset, run.count);
    }
  }

  OpContext& op_;
  const ScatterMessage& message_;
  const Reduction& reduction_;
  const RankPlans slices_;
  Contributions contributions_;
};

}  // namespace

void reduceScatter(OpContext& op, const std::vector<ScatterMessage>& messages, const Reduction& reduction) {
  reduceTensors<Scattering>(op, messages, reduction);
}

}  // namespace lowcomm

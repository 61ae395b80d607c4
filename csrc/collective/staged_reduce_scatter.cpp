#include "collective/staged_reduce_scatter.h"

#include <cstddef>
#include <deque>
#include <span>
#include <stdexcept>
#include <utility>

#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/phase.h"
#include "collective/plan.h"
#include "collective/reduce_tensors.h"
#include "collective/staged_check.h"
#include "collective/staged_contributions.h"
#include "collective/staged_sink.h"

namespace lowcomm {
namespace {

// One tensor: as Scattering of reduce_scatter.cpp, the sums being the device's.
class StagedScattering final : public Phase {
 public:
  StagedScattering(OpContext& op, DeviceCodec& device_codec, const ScatterMessage& message, const Reduction& reduction)
      : op_(op),
        device_codec_(device_codec),
        message_(message),
        average_over_(reduction.average ? op.group.size() : 0),
        slices_(message.layouts, message.dtype, op.group.chunk_bytes, op.group.size()),
        contributions_(op, device_codec, slices_, message.dtype, message.inputs, message.draws),
        own_(device_codec, slices_.of(op.group.rank()), message.inputs[op.group.rank()], sliceFor(op.group.rank())) {
    out = slices_.all();
    in.assign(op.size(), &slices_.of(op.rank()));
  }

  MessageSummary described() const { return slices_.described(); }

  uint64_t rawBytes() const { return slices_.rawBytesToPeers(op_.group.rank()); }

  void add(Exchange& exchange) { exchange.phases.push_back(this); }

  void start(size_t k) override {
    own_.start(k);
    contributions_.start(k);
  }
  void check(size_t k) override { own_.finish(k); }
  void encode(size_t k, int peer, std::span<std::byte> payload) override { contributions_.encode(k, peer, payload); }
  void absorb(size_t k, const Payloads& payloads) override { reduce(k, payloads); }

  void wait() {
    Stopwatch watch(op_, Doing::decode);
    while (!summed_.empty())
      waitForFirst();
  }

 private:
  void reduce(size_t k, const std::vector<std::span<const std::byte>>& payloads) {
    while (summed_.size() >= kStagedFrames)
      waitForFirst();
    auto loaded = contributions_.load(k, payloads);
    if (!loaded.slot) return;
    const DType dtype = message_.dtype;
    for (const auto& whole : loaded.runs) {
      const Run& run = *whole.run;
      std::byte* out = static_cast<std::byte*>(message_.output) + run.at * itemBytes(dtype);
      device_codec_.kernels().sum(run, out, dtype, whole.terms, average_over_, device_codec_.workspace(run, dtype),
                                  loaded.slot->word());
    }
    device_codec_.report(*loaded.slot);
    summed_.push_back(std::move(loaded));
  }

  void waitForFirst() {
    const auto loaded = std::move(summed_.front());
    summed_.pop_front();
    if (!device_codec_.refused(*loaded.slot)) return;
    for (const auto& whole : loaded.runs)
      contributions_.attribute(whole);
    throw std::logic_error(op_.op +
                           ": a sum was refused on the device, but every contribution to it decodes on the host");
  }

  OpContext& op_;
  DeviceCodec& device_codec_;
  const ScatterMessage& message_;
  const int average_over_;
  const RankPlans slices_;
  StagedContributions contributions_;
  StagedCheck own_;
  std::deque<StagedContributions::FrameTerms> summed_;  // by kernels that may still be at it
};

}  // namespace

void reduceScatterStaged(OpContext& op, DeviceCodec& device_codec, const std::vector<ScatterMessage>& messages,
                         const Reduction& reduction) {
  reduceTensors<StagedScattering>(op, messages, reduction, device_codec);
}

}  // namespace lowcomm

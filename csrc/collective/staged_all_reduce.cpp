#include "collective/staged_all_reduce.h"

#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <utility>

#include "codec/fused.h"
#include "collective/describe.h"
#include "collective/exchange.h"
#include "collective/rank_plans.h"
#include "collective/slices.h"
#include "collective/staged_contributions.h"
#include "collective/staged_sink.h"

namespace lowcomm {
namespace {

std::vector<Layout> layoutsOf(const std::vector<Slice>& slices, const CodecSpec& codec) {
  std::vector<Layout> layouts;
  for (const Slice& slice : slices)
    layouts.push_back(Layout::single(slice.count, codec));
  return layouts;
}

// One tensor: as Reducing of all_reduce.cpp, the sums being the device's. A sum's codes are copied to the host behind
// its kernel, and decoded on the device once it is known that nothing was refused: until then the own elements, from
// which the host's codec would have to tell what, stand as they were.
class StagedReducing {
 public:
  StagedReducing(OpContext& op, Stage& stage, const AllReduceMessage& message, const Reduction& reduction)
      : op_(op),
        stage_(stage),
        message_(message),
        average_over_(reduction.average ? op.group.size() : 0),
        slices_(slicesOf(message.elements, message.codec, op.group.size())),
        plans_(layoutsOf(slices_, message.codec), message.dtype, op.group.chunk_bytes, op.group.size()),
        own_(plans_.of(op.group.rank())),
        contributions_(op, stage, plans_, message.dtype, inputs(), message.draws) {
    size_t bytes = 0;
    for (const Chunk& chunk : own_.chunks) {
      starts_.push_back(bytes);
      bytes += chunk.payload_bytes;
    }
    codes_.resize(bytes);
    for (int rank = 0; rank < op.group.size(); ++rank)
      sinks_.push_back(std::make_unique<StagedSink>(
          op, stage, SinkElements{plans_.of(rank), elementsAt(slices_[rank].first), nullptr}));
  }

  Described described() const {
    Described described = plans_.described();
    described.elements = std::to_string(message_.elements);
    return described;
  }

  uint64_t rawBytes() const {
    const uint64_t peers = op_.group.size() - 1;
    const uint64_t all = message_.elements * itemBytes(message_.dtype);
    return all - own_.rawBytes() + peers * own_.rawBytes();  // everybody's slices, then its own to everybody
  }

  Phase scatter() {
    Phase phase;
    phase.out = plans_.all();
    phase.in.assign(op_.group.size(), &own_);
    phase.start = [this](size_t k) { contributions_.start(k); };
    phase.encode = [this](size_t k, int peer, std::span<std::byte> payload) {
      contributions_.encode(k, peer, payload);
    };
    phase.absorb = [this](size_t k, const std::vector<std::span<const std::byte>>& payloads) { reduce(k, payloads); };
    return phase;
  }

  // `scattering`: the number of scatter()'s phase. Its frames have no start: the codes are on their way from when they
  // were made.
  Phase gather(size_t scattering) {
    Phase phase;
    phase.out.assign(op_.group.size(), &own_);
    phase.in = plans_.all();
    phase.same_to_all = true;
    phase.after = scattering;
    phase.ready = [this](size_t k) { return k < own_.chunks.size() ? own_.wholeWith(k) : k; };
    phase.encode = [this](size_t k, int, std::span<std::byte> payload) {
      while (!sums_.empty() && sums_.front().k <= own_.wholeWith(k))
        settleFirst();
      std::memcpy(payload.data(), codes_.data() + starts_[k], payload.size());
    };
    phase.absorb = [this](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      for (int rank = 0; rank < op_.group.size(); ++rank) {
        if (rank != op_.group.rank() && !payloads[rank].empty()) sinks_[rank]->take(k, payloads[rank], rank);
      }
    };
    return phase;
  }

  void settle() {
    for (const auto& sink : sinks_)
      sink->settle();
  }

 private:
  // Sums of the runs that were whole with frame k, and their codes.
  struct Sum {
    size_t k;
    StagedContributions::Loaded from;
    Stage::SlotPtr codes;
  };

  std::vector<const void*> inputs() const {
    std::vector<const void*> inputs;
    for (const Slice& slice : slices_)
      inputs.push_back(elementsAt(slice.first));
    return inputs;
  }

  std::byte* elementsAt(uint64_t element) const {
    return static_cast<std::byte*>(message_.data) + element * itemBytes(message_.dtype);
  }
  std::byte* ownElements(const Run& run) const { return elementsAt(slices_[op_.group.rank()].first + run.at); }

  // Where the codes of a run of the own slice stand, given the frame that its last part is in.
  std::byte* place(size_t k, const Run& run) {
    size_t at = starts_[k];
    for (const Run& before : own_.chunks[k].runs) {
      if (&before == &run) break;
      at += before.bytes;
    }
    return codes_.data() + at - run.part;
  }

  Draws draws() const { return message_.draws.slot(static_cast<uint32_t>(op_.group.rank())).again(); }

  void reduce(size_t k, const std::vector<std::span<const std::byte>>& payloads) {
    while (sums_.size() >= kStagedFrames)
      settleFirst();
    auto loaded = contributions_.load(k, payloads);
    if (!loaded.slot) return;
    size_t bytes = 0;
    for (const auto& whole : loaded.runs)
      bytes += whole.run->whole;
    Sum sum{k, std::move(loaded), stage_.take(bytes)};
    stage_.clear(*sum.codes);
    std::byte* payload = sum.codes->device();
    for (const auto& whole : sum.from.runs) {
      stage_.kernels().encodeSum(*whole.run, payload, message_.dtype, whole.terms, average_over_, draws(),
                                 stage_.workspace(*whole.run, message_.dtype), sum.codes->word());
      payload += whole.run->whole;
    }
    stage_.fetch(*sum.codes);
    sums_.push_back(std::move(sum));
  }

  void settleFirst() {
    const Sum sum = std::move(sums_.front());
    sums_.pop_front();
    if (stage_.refused(*sum.codes)) reduceOnHost(sum);
    size_t at = 0;
    for (const auto& whole : sum.from.runs) {
      const Run& run = *whole.run;
      std::memcpy(place(sum.k, run), sum.codes->host() + at, run.whole);
      stage_.kernels().decode(run, ownElements(run), message_.dtype, sum.codes->device() + at,
                              stage_.workspace(run, message_.dtype), sum.codes->word());
      at += run.whole;
    }
  }

  // What was refused, a contribution or their sum, the host's codec tells as it does of tensors in host memory. No
  // codec has looked at this rank's own elements before: they may be why the sum cannot be encoded.
  void reduceOnHost(const Sum& sum) {
    std::byte* payload = sum.codes->host();
    for (const auto& whole : sum.from.runs) {
      const Run& run = *whole.run;
      const auto own = stage_.toHost(ownElements(run), run.count * itemBytes(message_.dtype));
      std::vector<std::byte> out(own.size());
      std::vector<Contribution> all(whole.payloads.size());
      for (size_t rank = 0; rank < all.size(); ++rank)
        all[rank].payload = whole.payloads[rank];
      all[op_.group.rank()].own = own.data();
      contributions_.blame(whole);
      try {
        run.countInMessage("of the sum", [&] {
          FusedCodec(run.codec).encodeSum({payload, run.whole}, out.data(), message_.dtype, all, average_over_,
                                          run.offset, run.count, draws());
        });
      } catch (const ValueError&) {
        run.codec->expectTaken(own.data(), message_.dtype, run.at, run.count, sliceFor(op_.group.rank()));
        throw;
      }
      payload += run.whole;
    }
    stage_.load(*sum.codes);
  }

  OpContext& op_;
  Stage& stage_;
  const AllReduceMessage& message_;
  const int average_over_;
  const std::vector<Slice> slices_;
  const RankPlans plans_;
  const MessagePlan& own_;
  StagedContributions contributions_;
  std::vector<size_t> starts_;                      // by frame of the own slice: where its payload is in codes_
  std::vector<std::byte> codes_;                    // of the own slice, reduced
  std::deque<Sum> sums_;                            // by kernels that may still be at it
  std::vector<std::unique_ptr<StagedSink>> sinks_;  // by rank, of the slices that it reduces
};

}  // namespace

void allReduceStaged(OpContext& op, Stage& stage, const std::vector<AllReduceMessage>& messages,
                     const Reduction& reduction) {
  std::deque<StagedReducing> tensors;
  std::vector<Described> described;
  Exchange exchange;
  for (const AllReduceMessage& message : messages) {
    StagedReducing& tensor = tensors.emplace_back(op, stage, message, reduction);
    described.push_back(tensor.described());
    op.counters.raw_bytes += tensor.rawBytes();
    const size_t scattering = exchange.phases.size();
    exchange.phases.push_back(tensor.scatter());
    exchange.phases.push_back(tensor.gather(scattering));
  }
  exchange.description = describeReduction(op.op, described, reduction);
  runExchange(op, exchange);
  for (StagedReducing& tensor : tensors)
    tensor.settle();
}

}  // namespace lowcomm

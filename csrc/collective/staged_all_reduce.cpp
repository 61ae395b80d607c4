#include "collective/staged_all_reduce.h"

#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <utility>

#include "codec/fused.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/reduce_tensors.h"
#include "collective/reduced_slices.h"
#include "collective/staged_contributions.h"
#include "collective/staged_sink.h"

namespace lowcomm {
namespace {

// One tensor: as Reducing of all_reduce.cpp, the sums being the device's. A sum's codes are copied to the host behind
// its kernel, and decoded on the device once it is known that nothing was refused: until then the own elements, from
// which the host's codec would have to tell what, stand as they were.
class StagedReducing {
 public:
  StagedReducing(OpContext& op, DeviceCodec& device_codec, const AllReduceMessage& message, const Reduction& reduction)
      : device_codec_(device_codec),
        message_(message),
        average_over_(reduction.average ? op.group.size() : 0),
        slices_(op, message),
        contributions_(op, device_codec, slices_.plans(), message.dtype, slices_.inputs(), message.draws) {
    for (int rank = 0; rank < slices_.ranks(); ++rank)
      sinks_.push_back(std::make_unique<StagedSink>(
          op, device_codec, SinkElements{slices_.plans().of(rank), slices_.elements(rank), nullptr}));
  }

  MessageSummary described() const { return slices_.described(); }
  uint64_t rawBytes() const { return slices_.rawBytes(); }

  void add(Exchange& exchange) {
    exchange.phases.push_back(&first_);
    exchange.phases.push_back(&second_);
  }

  void start(size_t k) { contributions_.start(k); }
  void encode(size_t k, int peer, std::span<std::byte> payload) { contributions_.encode(k, peer, payload); }
  void reduce(size_t k, const Payloads& payloads) {
    while (sums_.size() >= kStagedFrames)
      waitForFirst();
    auto loaded = contributions_.load(k, payloads);
    if (!loaded.slot) return;
    size_t bytes = 0;
    for (const auto& whole : loaded.runs)
      bytes += whole.run->whole;
    Sum sum{k, std::move(loaded), device_codec_.take(bytes)};
    device_codec_.clear(*sum.codes);
    std::byte* payload = sum.codes->device();
    for (const auto& whole : sum.from.runs) {
      device_codec_.kernels().encodeSum(*whole.run, payload, message_.dtype, whole.terms, average_over_, draws(),
                                        device_codec_.workspace(*whole.run, message_.dtype), sum.codes->word());
      payload += whole.run->whole;
    }
    device_codec_.fetch(*sum.codes);
    sums_.push_back(std::move(sum));
  }

  // These frames have no start: the codes are on their way from when they were made.
  void encodeSums(size_t k, std::span<std::byte> payload) {
    while (!sums_.empty() && sums_.front().k <= slices_.own().wholeWith(k))
      waitForFirst();
    slices_.copyCodes(k, payload);
  }

  void take(int rank, size_t k, std::span<const std::byte> payload) { sinks_[rank]->take(k, payload, rank); }

  void wait() {
    for (const auto& sink : sinks_)
      sink->wait();
  }

 private:
  // Sums of the runs that were whole with frame k, and their codes.
  struct Sum {
    size_t k;
    StagedContributions::FrameTerms from;
    DeviceCodec::SlotPtr codes;
  };

  std::byte* ownElements(const Run& run) const { return slices_.elements(slices_.rank(), run); }

  Draws draws() const { return message_.draws.slot(static_cast<uint64_t>(slices_.rank())).again(); }

  void waitForFirst() {
    const Sum sum = std::move(sums_.front());
    sums_.pop_front();
    if (device_codec_.refused(*sum.codes)) reduceOnHost(sum);
    size_t at = 0;
    for (const auto& whole : sum.from.runs) {
      const Run& run = *whole.run;
      std::memcpy(slices_.codes(sum.k, run).data(), sum.codes->host() + at, run.whole);
      device_codec_.kernels().decode(run, ownElements(run), message_.dtype, sum.codes->device() + at,
                                     device_codec_.workspace(run, message_.dtype), sum.codes->word());
      at += run.whole;
    }
  }

  // What was refused, a contribution or their sum, the host's codec tells as it does of tensors in host memory. No
  // codec has looked at this rank's own elements before: they may be why the sum cannot be encoded.
  void reduceOnHost(const Sum& sum) {
    std::byte* payload = sum.codes->host();
    for (const auto& whole : sum.from.runs) {
      const Run& run = *whole.run;
      const auto own = device_codec_.toHost(ownElements(run), run.count * itemBytes(message_.dtype));
      std::vector<std::byte> out(own.size());
      std::vector<Contribution> all(whole.payloads.size());
      for (size_t rank = 0; rank < all.size(); ++rank)
        all[rank].payload = whole.payloads[rank];
      all[slices_.rank()].own = own.data();
      contributions_.attribute(whole);
      try {
        run.countInMessage("of the sum", [&] {
          FusedCodec(run.codec).encodeSum({payload, run.whole}, out.data(), message_.dtype, all, average_over_,
                                          run.offset, run.count, draws());
        });
      } catch (const ValueError&) {
        run.codec->expectTaken(own.data(), message_.dtype, run.at, run.count, sliceFor(slices_.rank()));
        throw;
      }
      payload += run.whole;
    }
    device_codec_.load(*sum.codes);
  }

  DeviceCodec& device_codec_;
  const AllReduceMessage& message_;
  const int average_over_;
  ReducedSlices slices_;
  StagedContributions contributions_;
  std::deque<Sum> sums_;                            // by kernels that may still be at it
  std::vector<std::unique_ptr<StagedSink>> sinks_;  // by rank, of the slices that it reduces
  SendSlices<StagedReducing> first_{*this, slices_};
  SendSums<StagedReducing> second_{*this, slices_};
};

}  // namespace

void allReduceStaged(OpContext& op, DeviceCodec& device_codec, const std::vector<AllReduceMessage>& messages,
                     const Reduction& reduction) {
  reduceTensors<StagedReducing>(op, messages, reduction, device_codec);
}

}  // namespace lowcomm

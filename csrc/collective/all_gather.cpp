#include "collective/all_gather.h"

#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <span>

#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/plan.h"
#include "collective/sink.h"
#include "collective/source.h"

namespace lowcomm {
namespace {

// One tensor's way from its input to every rank's output.
class Gathering {
 public:
  Gathering(OpContext& op, const GatherMessage& message)
      : op_(op), message_(message), plans_(message.layouts, message.dtype, op.group.chunk_bytes, op.group.size()) {
    const int own = op.group.rank();
    source_ = makeSource(op, message.device_codec,
                         {plans_.of(own), message.input, message.draws, {}, /*decoded=*/message.outputs[own]});
    for (int rank = 0; rank < op.group.size(); ++rank) {
      sinks_.push_back(makeSink(op, message.device_codec,
                                {plans_.of(rank), message.outputs[rank], rank == own ? message.input : nullptr}));
    }
  }

  MessageSummary described() const { return plans_.described().as(message_.type_name, message_.type_elements); }

  // Its own part to every other; around a ring all parts but the next rank's.
  uint64_t rawBytes(bool ring) const {
    const int rank = op_.group.rank(), size = op_.group.size();
    if (!ring) return plans_.of(rank).rawBytes() * (size - 1);
    uint64_t bytes = 0;
    for (int owner = 0; owner < size; ++owner)
      bytes += owner == (rank + 1) % size ? 0 : plans_.of(owner).rawBytes();
    return bytes;
  }

  // All at once: each rank to all others.
  Phase direct() {
    Phase phase;
    phase.out.assign(op_.group.size(), &plans_.of(op_.group.rank()));
    phase.in = plans_.all();
    phase.same_to_all = true;
    phase.start = [this](size_t k) { start(k); };
    phase.encode = [this](size_t k, int, std::span<std::byte> payload) { source_->encode(k, payload); };
    phase.absorb = [this](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      for (int rank = 0; rank < op_.group.size(); ++rank) {
        if (!payloads[rank].empty()) take(rank, k, payloads[rank], rank);
      }
    };
    return phase;
  }

  // Step s of the ring: what rank − s contributed goes on to the next rank, made from step s − 1, which is the phase
  // before.
  Phase relay(int step, size_t number) {
    const int rank = op_.group.rank(), size = op_.group.size();
    const int next = (rank + 1) % size, before = (rank - 1 + size) % size;
    const int sent = (rank - step + size) % size, got = (sent - 1 + size) % size;
    Phase phase;
    phase.out.assign(size, nullptr);
    phase.in.assign(size, nullptr);
    phase.out[next] = &plans_.of(sent);
    phase.in[before] = &plans_.of(got);
    if (step > 0) {
      phase.after = number - 1;
      phase.ready = [](size_t k) { return k; };
    }
    if (step == 0) phase.start = [this](size_t k) { start(k); };
    phase.encode = [this, step](size_t k, int, std::span<std::byte> payload) {
      if (step == 0) {
        source_->encode(k, payload);
        take(op_.group.rank(), k, payload, op_.group.rank());
      } else {
        std::memcpy(payload.data(), codes_[k].data(), payload.size());
      }
    };
    const bool goes_on = step + 2 < size;
    phase.absorb = [this, before, got, goes_on](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      const auto payload = payloads[before];
      if (payload.empty()) return;
      take(got, k, payload, before);
      if (!goes_on) return;
      if (codes_.size() <= k) codes_.resize(k + 1);
      codes_[k].assign(payload.begin(), payload.end());
    };
    return phase;
  }

  void wait() {
    for (const auto& sink : sinks_)
      sink->wait();
  }

 private:
  void start(size_t k) {
    if (k < plans_.of(op_.group.rank()).frames.size()) source_->start(k);
  }

  // Frame k of what `owner` contributed, as `sender` sent it. Of staged elements the source has decoded its own.
  void take(int owner, size_t k, std::span<const std::byte> payload, int sender) {
    if (!message_.device_codec || owner != op_.group.rank()) sinks_[owner]->take(k, payload, sender);
  }

  OpContext& op_;
  const GatherMessage& message_;
  const RankPlans plans_;
  std::unique_ptr<Source> source_;             // the same for all peers
  std::vector<std::unique_ptr<Sink>> sinks_;   // by rank
  std::vector<std::vector<std::byte>> codes_;  // by frame, what the ring sends on in its next step
};

}  // namespace

void allGather(OpContext& op, const std::vector<GatherMessage>& messages) {
  std::deque<Gathering> tensors;
  std::vector<MessageSummary> described;
  Exchange exchange;
  const int size = op.group.size();
  const bool ring = op.group.ring_from > 0 && size > 2 && size >= op.group.ring_from;
  for (const GatherMessage& message : messages) {
    Gathering& tensor = tensors.emplace_back(op, message);
    described.push_back(tensor.described());
    op.counters.raw_bytes += tensor.rawBytes(ring);
    if (!ring) exchange.phases.push_back(tensor.direct());
    for (int step = 0; ring && step < size - 1; ++step)
      exchange.phases.push_back(tensor.relay(step, exchange.phases.size()));
  }
  exchange.description = describe(op.op, described);
  runExchange(op, exchange);
  for (Gathering& tensor : tensors)
    tensor.wait();
}

}  // namespace lowcomm

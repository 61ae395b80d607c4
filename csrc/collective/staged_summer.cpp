#include "collective/staged.h"

#include <cstring>
#include <stdexcept>

#include "base/error.h"
#include "codec/fused.h"
#include "collective/op_context.h"

namespace lowcomm {

StagedSummer::StagedSummer(OpContext& op, DeviceCodec& device_codec, const SumElements& elements)
    : op_(op),
      device_codec_(device_codec),
      elements_(elements),
      own_(elements.slices.of(op.rank())),
      average_over_(elements.reduction.average ? op.size() : 0) {
  for (int rank = 0; rank < op.size(); ++rank) {
    const MessagePlan& slice = elements.slices.of(rank);
    const std::vector<ScatterEntry>& entries = elements.entries[rank];
    const SourceElements source{slice, nullptr, elements.draws, sliceFor(rank), nullptr, &entries};
    sources_.push_back(rank == op.rank() ? nullptr : std::make_unique<StagedSource>(device_codec, source));
    if (rank == op.rank() && !elements.encoded_again)
      check_.emplace(device_codec, slice, entries.empty() ? nullptr : entries.front().input, source.of);
    if (!elements.encoded_again) continue;
    sinks_.push_back(std::make_unique<StagedSink>(op, device_codec, SinkElements{slice, nullptr, nullptr, &entries}));
  }
  if (elements.encoded_again) codes_.emplace(own_);
}

void StagedSummer::start(size_t k) {
  if (check_) check_->start(k);
  for (size_t rank = 0; rank < sources_.size(); ++rank) {
    if (sources_[rank] && k < elements_.slices.of(static_cast<int>(rank)).frames.size()) sources_[rank]->start(k);
  }
}

void StagedSummer::check(size_t k) {
  if (check_) check_->finish(k);
}

void StagedSummer::absorb(size_t k, const Payloads& payloads) {
  while (sums_.size() >= kStagedFrames)
    finishFirst();
  Sum sum = load(k, payloads);
  if (!sum.terms) return;
  codes_ ? encodeAgain(sum) : addUp(sum);
  sums_.push_back(std::move(sum));
}

// The runs that are whole with frame k, their payloads on the way to the device.
StagedSummer::Sum StagedSummer::load(size_t k, const Payloads& payloads) {
  Sum sum{k, {}};
  if (k >= own_.frames.size()) return sum;  // other slices are longer
  const Frame& frame = own_.frames[k];
  const size_t ranks = payloads.size(), own_rank = static_cast<size_t>(op_.rank());
  size_t bytes = 0;
  for (const Run& run : frame.runs)
    bytes += run.last() && run.count > 0 ? (ranks - 1) * run.whole : 0;
  if (bytes > 0) sum.terms = device_codec_.take(bytes);
  size_t at = 0, to = 0;  // in the frames, in the slot
  for (const Run& run : frame.runs) {
    const bool whole = run.last() && run.count > 0;
    RunTerms all{&run, std::vector<StagedTerm>(ranks), Payloads(ranks)};
    all.terms[own_rank].own = input(run);
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (rank == own_rank) continue;
      const auto payload = incoming_.take(run, static_cast<int>(rank), payloads[rank].subspan(at, run.bytes));
      if (!whole) continue;
      op_.attribute(static_cast<int>(rank), [&] { expectPadded(run, elements_.dtype, payload); });
      std::memcpy(sum.terms->host() + to, payload.data(), payload.size());
      all.payloads[rank] = {sum.terms->host() + to, payload.size()};
      all.terms[rank].payload = sum.terms->device() + to;
      to += payload.size();
    }
    at += run.bytes;
    if (!whole) continue;
    sum.runs.push_back(std::move(all));
  }
  if (sum.terms) device_codec_.load(*sum.terms);
  return sum;
}

void StagedSummer::addUp(Sum& sum) {
  for (const RunTerms& all : sum.runs) {
    device_codec_.kernels().sum(*all.run, output(*all.run), elements_.dtype, all.terms, average_over_,
                                device_codec_.workspace(*all.run, elements_.dtype), sum.terms->word());
  }
  device_codec_.report(*sum.terms);
}

void StagedSummer::encodeAgain(Sum& sum) {
  size_t bytes = 0;
  for (const RunTerms& all : sum.runs)
    bytes += all.run->whole;
  sum.codes = device_codec_.take(bytes);
  device_codec_.clear(*sum.codes);
  std::byte* payload = sum.codes->device();
  for (const RunTerms& all : sum.runs) {
    device_codec_.kernels().encodeSum(*all.run, payload, elements_.dtype, all.terms, average_over_, drawsOf(*all.run),
                                      device_codec_.workspace(*all.run, elements_.dtype), sum.codes->word());
    payload += all.run->whole;
  }
  device_codec_.fetch(*sum.codes);
}

void StagedSummer::finishFirst() {
  const Sum sum = std::move(sums_.front());
  sums_.pop_front();
  if (codes_) return takeCodes(sum);
  if (!device_codec_.refused(*sum.terms)) return;
  for (const RunTerms& all : sum.runs)
    attribute(all);
  throw std::logic_error(op_.op +
                         ": a sum was refused on the device, but every contribution to it decodes on the host");
}

void StagedSummer::takeCodes(const Sum& sum) {
  if (device_codec_.refused(*sum.codes)) encodeOnHost(sum);
  size_t at = 0;
  for (const RunTerms& all : sum.runs) {
    const Run& run = *all.run;
    std::memcpy(codes_->of(sum.k, run).data(), sum.codes->host() + at, run.whole);
    device_codec_.kernels().decode(run, output(run), elements_.dtype, sum.codes->device() + at,
                                   device_codec_.workspace(run, elements_.dtype), sum.codes->word());
    at += run.whole;
  }
}

// A contribution or a sum was refused: the host's codec tells the error as it does for tensors in host memory. No codec
// has looked at this rank's own elements before: they may be why the sum cannot be encoded.
void StagedSummer::encodeOnHost(const Sum& sum) {
  const DType dtype = elements_.dtype;
  std::byte* payload = sum.codes->host();
  for (const RunTerms& all : sum.runs) {
    const Run& run = *all.run;
    auto own = device_codec_.toHost(input(run), run.count * itemBytes(dtype));
    std::vector<std::byte> out(own.size());
    std::vector<Contribution> terms(all.payloads.size());
    for (size_t rank = 0; rank < terms.size(); ++rank)
      terms[rank].payload = all.payloads[rank];
    terms[op_.rank()].own = own.data();
    attribute(all);
    try {
      FusedCodec(run.codec).encodeSum({payload, run.whole}, out.data(), dtype, terms, average_over_, run.offset,
                                      run.count, drawsOf(run));
    } catch (const NonFiniteError& error) {
      run.codec->expectTaken(own.data(), dtype, run.at, run.count, sliceFor(op_.rank()));
      throw run.inMessage(error, "of the sum");
    } catch (const ValueError&) {
      run.codec->expectTaken(own.data(), dtype, run.at, run.count, sliceFor(op_.rank()));
      throw;
    }
    payload += run.whole;
  }
  device_codec_.load(*sum.codes);
}

// Decodes the payloads on the host: throws PeerError for the rank whose does not.
void StagedSummer::attribute(const RunTerms& all) const {
  const Run& run = *all.run;
  std::vector<std::byte> decoded(run.count * itemBytes(elements_.dtype));
  for (size_t rank = 0; rank < all.payloads.size(); ++rank) {
    if (all.payloads[rank].empty()) continue;
    op_.attribute(static_cast<int>(rank), [&] {
      run.codec->decode(decoded.data(), elements_.dtype, all.payloads[rank], run.offset, run.count);
    });
  }
}

// A frame's codes are on their way from when they were made.
void StagedSummer::encodeSums(size_t k, std::span<std::byte> payload) {
  while (!sums_.empty() && sums_.front().k <= own_.wholeWith(k))
    finishFirst();
  codes_->copy(k, payload);
}

void StagedSummer::takeSums(int owner, size_t k, std::span<const std::byte> payload) {
  sinks_[owner]->take(k, payload, owner);
}

void StagedSummer::wait() {
  {
    Stopwatch watch(op_, Doing::decode);
    while (!sums_.empty())
      finishFirst();
  }
  for (const auto& sink : sinks_)
    sink->wait();
}

const void* StagedSummer::input(const Run& run) const {
  return static_cast<const std::byte*>(entry(run).input) + run.offset * itemBytes(elements_.dtype);
}

std::byte* StagedSummer::output(const Run& run) const {
  return static_cast<std::byte*>(entry(run).output) + run.offset * itemBytes(elements_.dtype);
}

Draws StagedSummer::drawsOf(const Run& run) const {
  return elements_.draws.slot(entry(run).slot).again();
}

}  // namespace lowcomm

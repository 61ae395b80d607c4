#include "collective/coded_sums.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "codec/pieces.h"
#include "kernels/finite.h"
#include "kernels/isa/table.h"
#include "kernels/low_rank/low_rank.h"

namespace lowcomm {
namespace {

// Elements of a matrix that are expanded at a time: rows enough for a kernel to use what it has loaded of R.
constexpr uint64_t kExpanded = 1 << 16;
constexpr uint64_t kLeastRows = 16;

// Elements that are decoded before they are taken: a reader of several other arrays wants some pages of each at a time.
constexpr uint64_t kTaken = 1 << 12;

}  // namespace

SumCodes::SumCodes(const MessagePlan& slice) : slice_(slice) {
  size_t bytes = 0;
  for (const Frame& frame : slice.frames) {
    starts_.push_back(bytes);
    bytes += frame.payload_bytes;
  }
  bytes_.resize(bytes);
}

size_t SumCodes::at(size_t k, const Run& run) const {
  size_t at = starts_[k];
  for (const Run& before : slice_.frames[k].runs) {
    if (&before == &run) break;
    at += before.bytes;
  }
  return at - run.part;
}

void SumCodes::copy(size_t k, std::span<std::byte> payload) const {
  std::memcpy(payload.data(), bytes_.data() + starts_[k], payload.size());
}

void SumCodes::take(size_t k, std::span<const std::byte> payload) {
  std::memcpy(bytes_.data() + starts_[k], payload.data(), payload.size());
}

CodedSums::CodedSums(std::shared_ptr<const RankPlans> slices, const ScatterEntries& entries)
    : slices_(std::move(slices)) {
  for (size_t owner = 0; owner < entries.size(); ++owner) {
    const MessagePlan& plan = slices_->of(static_cast<int>(owner));
    codes_.emplace_back(plan);
    for (size_t k = 0; k < plan.frames.size(); ++k) {
      for (size_t r = 0; r < plan.frames[k].runs.size(); ++r) {
        const Run& run = plan.frames[k].runs[r];
        if (!run.last()) continue;
        const ScatterEntry& entry = entries[owner][run.segment];
        if (places_.size() <= entry.tensor) places_.resize(entry.tensor + 1);
        places_[entry.tensor].push_back({static_cast<int>(owner), k, r, entry.first + run.offset});
      }
    }
  }
  for (std::vector<Place>& places : places_)
    std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.first < b.first; });
}

void CodedSums::see(const float* x, uint64_t count) {
  finite_ = finite_ && firstNonFinite(x, DType::float32, count, std::numeric_limits<float>::infinity()) < 0;
}

void CodedSums::decode(uint32_t tensor, const TakeElements& take) const {
  if (tensor >= places_.size()) return;  // without elements
  std::vector<std::byte> scratch;
  std::vector<float> x;
  for (const Place& place : places_[tensor]) {
    const Run& run = slices_->of(place.owner).frames[place.frame].runs[place.run];
    const std::span<const std::byte> codes = codes_[place.owner].of(place.frame, run);
    uint64_t first = 0, count = 0;  // decoded and not taken
    for (Pieces piece(*run.codec, run.count); piece.more();) {
      x.resize(std::max<size_t>(x.size(), count + piece.size()));
      run.codec->decode(x.data() + count, DType::float32, piece.get(codes, scratch), run.offset + piece.at(),
                        piece.size());
      count += piece.size();
      piece.next();
      if (count < kTaken && piece.more()) continue;
      take(place.first + first, count, x.data());
      first += std::exchange(count, 0);
    }
  }
}

size_t CodedSums::bytes() const {
  size_t bytes = 0;
  for (const SumCodes& codes : codes_)
    bytes += codes.bytes();
  return bytes;
}

void CodedAverage::decode(size_t tensor, const TakeElements& take) const {
  const Tensor& t = tensors[tensor];
  if (t.rank == 0) return sums->decode(t.number, take);
  if (t.whole) return take(0, t.rows * t.columns, t.whole);
  const uint64_t step = std::max(kExpanded / t.columns, kLeastRows);
  std::vector<float> p, x;
  for (uint64_t row = 0; row < t.rows; row += step) {
    const uint64_t rows = std::min(step, t.rows - row);
    p.resize(t.rank * rows);
    x.resize(rows * t.columns);
    for (uint64_t k = 0; k < t.rank; ++k)
      std::copy_n(t.p.data() + k * t.rows + row, rows, p.data() + k * rows);
    kernels().low_rank->expand(x.data(), p.data(), t.r.data(), rows, t.columns, t.rank);
    take(row * t.columns, rows * t.columns, x.data());
  }
}

size_t CodedAverage::bytes() const {
  size_t bytes = sums ? sums->bytes() : 0;
  for (const Tensor& tensor : tensors)
    bytes += (tensor.p.size() + tensor.r.size() + tensor.own.size()) * sizeof(float);
  return bytes;
}

}  // namespace lowcomm

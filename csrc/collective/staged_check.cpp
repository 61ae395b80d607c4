#include "collective/staged_check.h"

#include <algorithm>
#include <utility>

namespace lowcomm {
namespace {

bool refusesSome(const CodecSpec& codec) {
  const PlainFamily* plain = plainFamily(codec.id);
  return codec.id != CodecId::none && codec.nonfinite == Nonfinite::error && !(plain && !plain->nonfinite);
}

}  // namespace

void StagedCheck::start(size_t k) {
  if (k >= plan_.frames.size()) return;
  FrameInFlight begun{{nullptr, {nullptr}}, {}};
  size_t bytes = 0;
  for (const Run& run : plan_.frames[k].runs) {
    if (run.part > 0 || run.count == 0 || !refusesSome(run.codec->spec())) continue;
    begun.runs.push_back(&run);
    bytes = std::max(bytes, run.whole);
  }
  if (!begun.runs.empty()) {
    begun.slot = device_codec_.take(bytes);
    device_codec_.clear(*begun.slot);
    for (const Run* run : begun.runs) {  // one payload over the other
      device_codec_.kernels().encode(*run, begun.slot->device(), data_ + run->at * itemBytes(plan_.dtype), plan_.dtype,
                                     Draws{}, device_codec_.workspace(*run, plan_.dtype), begun.slot->word());
    }
    device_codec_.report(*begun.slot);
  }
  begun_.push_back(std::move(begun));
}

void StagedCheck::finish(size_t k) {
  if (k >= plan_.frames.size()) return;
  const FrameInFlight begun = std::move(begun_.front());
  begun_.pop_front();
  if (!begun.slot || !device_codec_.refused(*begun.slot)) return;
  // Also told of a range beyond delta, which only what is encoded may not have: the codec knows.
  for (const Run* run : begun.runs) {
    const size_t item = itemBytes(plan_.dtype);
    const auto x = device_codec_.toHost(data_ + run->at * item, run->count * item);
    run->codec->expectTaken(x.data(), plan_.dtype, run->at, run->count, of_);
  }
}

}  // namespace lowcomm

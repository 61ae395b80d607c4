#include "collective/loss.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "kernels/reduce.h"

namespace lowcomm {

std::optional<Window> windowOf(const Loss& loss, size_t k, size_t frames, const Run& run, uint32_t step) {
  if (loss.taken() || run.codec->spec().id == CodecId::none || k != step % frames) return std::nullopt;
  const uint64_t granule = run.codec->granularity();
  if (granule == Codec::kUncut || granule >= run.count) {
    if (run.count == 0 || run.count > kMostSampled) return std::nullopt;
    return Window{0, run.count};
  }
  if (granule > kMostSampled) return std::nullopt;
  const uint64_t length = std::min(std::max(kSampled / granule, uint64_t{1}) * granule, run.count);
  return Window{step / frames % (run.count / length) * length, length};
}

void addLoss(Loss& loss, const float* x, const float* decoded, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    const double value = x[i], lost = static_cast<double>(decoded[i]) - value;
    if (!std::isfinite(value) || !std::isfinite(lost)) continue;
    loss.whole += value * value;
    loss.lost += lost * lost;
  }
}

void addLossOf(Loss& loss, const Run& run, const Window& window, const std::vector<float>& x, const Draws& draws) {
  // Of the thread, which encodes op after op: fresh memory would cost more than the sample.
  thread_local std::vector<std::byte> payload;
  thread_local std::vector<float> decoded;
  const uint64_t at = run.offset + window.first;
  payload.resize(run.codec->encodedBytes(window.count, DType::float32));
  decoded.resize(window.count);
  run.codec->encode(payload, x.data(), DType::float32, at, window.count, draws);
  run.codec->decode(decoded.data(), DType::float32, payload, at, window.count);
  addLoss(loss, x.data(), decoded.data(), window.count);
}

void sample(Loss& loss, size_t k, size_t frames, const Run& run, const void* src, DType dtype, const Draws& draws) {
  const auto window = windowOf(loss, k, frames, run, draws.step);
  if (!window) return;
  thread_local std::vector<float> x;
  x.resize(window->count);
  reduceAssign(x.data(), static_cast<const std::byte*>(src) + window->first * itemBytes(dtype), dtype, window->count);
  addLossOf(loss, run, *window, x, draws);
}

}  // namespace lowcomm

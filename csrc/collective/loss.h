#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "codec/codec.h"
#include "collective/counters.h"
#include "collective/plan.h"

namespace lowcomm {

// How much encoding loses, from a sample that takes little next to the encoding itself: of one frame of each op some
// thousands of elements, in another frame and place from step to step.

// Elements of a run that stand for their op, counted in the run.
struct Window {
  uint64_t first, count;
};

inline constexpr uint64_t kSampled = 4096;           // elements of a sample ...
inline constexpr uint64_t kMostSampled = 16 * 1024;  // ... but no fewer than the codec takes at once, up to so many

// The sample of an op that lies in this run of frame k of `frames`. Nothing where it is elsewhere, was taken, the run
// travels exact, or its codec takes more than kMostSampled elements at once.
std::optional<Window> windowOf(const Loss& loss, size_t k, size_t frames, const Run& run, uint32_t step);

// Adds what encoding loses of x to `loss`, both fp32; what is not finite is left out.
void addLoss(Loss& loss, const float* x, const float* decoded, uint64_t count);

// Adds what encoding loses of a window of a run: `x` is encoded as the run's elements there, and decoded.
void addLossOf(Loss& loss, const Run& run, const Window& window, const std::vector<float>& x, const Draws& draws);

// Both for a run that has been encoded from `src` with these draws: the window is encoded once more, and decoded.
void sample(Loss& loss, size_t k, size_t frames, const Run& run, const void* src, DType dtype, const Draws& draws);

}  // namespace lowcomm

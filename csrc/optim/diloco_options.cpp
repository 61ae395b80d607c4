#include "optim/diloco_options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "optim/message_codec.h"

namespace lowcomm {
namespace {

constexpr std::array<const char*, 4> kModes = {"sync", "continue", "restart", "eager"};

template <class T>
[[noreturn]] void refuse(const char* field, const std::string& expected, T got) {
  throw ValueError(std::string("DiLoCoX: ") + field + ": expected " + expected + ", got " + std::to_string(got));
}

void expectAtLeast(const char* field, int64_t least, int64_t got) {
  if (got < least) refuse(field, std::to_string(least) + " or more", got);
}

}  // namespace

const char* outerModeName(OuterMode mode) {
  return kModes[static_cast<size_t>(mode)];
}

OuterMode outerMode(const std::string& name) {
  for (size_t i = 0; i < kModes.size(); ++i) {
    if (name == kModes[i]) return static_cast<OuterMode>(i);
  }
  throw ValueError("DiLoCoX: mode: expected sync, continue, restart or eager, got '" + name + "'");
}

void DiLoCoXOptions::check() const {
  expectAtLeast("sync_every", 1, sync_every);
  if (fragments < 1 || fragments > sync_every)
    refuse("fragments", "1..." + std::to_string(sync_every) + ", sync_every", fragments);
  if (delay < 0 || delay > sync_every)
    refuse("fragment_sync_delay", "0..." + std::to_string(sync_every) + ", sync_every", delay);
  if (delay > 0 && mode == OuterMode::sync) refuse("fragment_sync_delay", "none with mode sync, which waits", delay);
  if (delay > 0 && delay < sync_every && mode == OuterMode::eager)
    refuse("fragment_sync_delay", "none with mode eager, whose delay is sync_every", delay);
  if (delay > 0 && delay < sync_every && adapt_sync_every)
    refuse("fragment_sync_delay", "none beside an adaptive sync_every, which may fall below it", delay);
  if (!(alpha >= 0 && alpha < 1)) refuse("fragment_update_alpha", "a number in [0, 1)", alpha);
  if (alpha > 0 && mode != OuterMode::restart)
    refuse("fragment_update_alpha", std::string("0 with mode ") + outerModeName(mode) + " (it is restart's)", alpha);
  expectAtLeast("sync_warmup", 0, sync_warmup);
  if (!(lr > 0) || std::isinf(lr)) refuse("outer_lr", "a number above 0", lr);
  if (!(momentum >= 0 && momentum < 1)) refuse("outer_momentum", "a number in [0, 1)", momentum);
  expectAtLeast("rank", 0, rank);
  for (const CodecSpec& spec : {codec, projection})
    expectMessageCodec("DiLoCoX", spec);
  const bool exact = codec.id == CodecId::none;
  if (exact && (rank > 0 || error_feedback || projection.id != CodecId::none))
    throw ValueError("DiLoCoX: codec: expected one beside rank, projection_codec or error_feedback, got none");
  if (projection.id != CodecId::none && rank == 0)
    throw ValueError("DiLoCoX: projection_codec: expected rank beside it, got none");
  if (eight_bits && !error_feedback)
    throw ValueError("DiLoCoX: residual_dtype: expected error_feedback beside int8, got none");
  if ((adapt_rank || adapt_sync_every) && rank == 0)
    throw ValueError("DiLoCoX: adaptive compression: expected a rank, got none");
  if (rank > 0 && (min_rank < 1 || min_rank > rank)) refuse("min_rank", "1..." + std::to_string(rank), min_rank);
  if (min_sync_every < 1 || min_sync_every > sync_every)
    refuse("min_sync_every", "1..." + std::to_string(sync_every), min_sync_every);
  if (adapt_sync_every && min_sync_every < fragments)
    refuse("min_sync_every", "the number of fragments or more", min_sync_every);
  expectAtLeast("window", 1, window);
  if (!(energy > 0 && energy <= 1)) refuse("energy", "a number in (0, 1]", energy);
  expectAtLeast("check_every", 0, check_every);
}

double Adaptation::rank() const {
  const auto first = static_cast<double>(options_.rank);
  if ((!options_.adapt_rank && !options_.adapt_sync_every) || effective_.empty()) return first;
  if (options_.rank_rule) {
    const double rank = options_.rank_rule(effective_);
    if (!(rank >= 1 && rank <= first)) {
      throw ValueError("DiLoCoX: rank_rule: expected a number in [1, " + std::to_string(options_.rank) + "], got " +
                       std::to_string(rank));
    }
    return rank;
  }
  const auto window = static_cast<size_t>(options_.window);
  if (effective_.size() < window) return first;
  const double sum = std::accumulate(effective_.end() - options_.window, effective_.end(), 0.0);
  return std::clamp(sum / static_cast<double>(window), static_cast<double>(options_.min_rank), first);
}

int64_t Adaptation::syncEvery(double rank) const {
  if (!options_.adapt_sync_every) return options_.sync_every;
  const int64_t steps =
      options_.sync_rule
          ? options_.sync_rule(rank)
          : static_cast<int64_t>(std::llround(static_cast<double>(options_.sync_every) * rank / options_.rank));
  if (options_.sync_rule && (steps < options_.fragments || steps > options_.sync_every)) {
    throw ValueError("DiLoCoX: sync_rule: expected a number in " + std::to_string(options_.fragments) + "..." +
                     std::to_string(options_.sync_every) + ", got " + std::to_string(steps));
  }
  return std::max(steps, options_.min_sync_every);
}

}  // namespace lowcomm

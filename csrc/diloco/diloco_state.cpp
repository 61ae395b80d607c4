// The checkpoint of an outer loop: its fragments, counters and schedule.
#include <algorithm>

#include "base/error.h"
#include "diloco/diloco.h"

namespace lowcomm {

namespace {

// Waits for all averages; returns the first error.
std::exception_ptr awaitAll(Fragments& fragments, SiteVote& vote) {
  std::exception_ptr error;
  for (FragmentSchedule& s : fragments) {
    for (Fragment& stripe : s.stripes) {
      try {
        vote.await(stripe);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
  }
  return error;
}

}  // namespace

TensorMap DiLoCoX::counters() const {
  const auto number = [](int64_t value) { return at::scalar_tensor(value, at::kLong); };
  TensorMap state{{"ranks", number(groups_.empty() ? 0 : groups_[0]->size())},
                  {"mode", number(static_cast<int64_t>(options_.mode))},
                  {"fragments", number(options_.fragments)},
                  {"delay", number(options_.delay)},
                  {"steps", number(clock_.steps)},
                  {"applied", number(history_.applied)},
                  {"sync_every", number(clock_.sync_every)},
                  {"rank", at::scalar_tensor(adaptation_.rank(), at::kDouble)},
                  {"outer_steps", number(report_.outer_steps)}};
  state["effective_ranks"] = at::tensor(adaptation_.effectiveRanks(), at::kDouble);
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const FragmentSchedule& s = fragments_[f];
    const std::string name = "fragment" + std::to_string(f);
    state[name] = at::tensor({s.send_at, s.apply_at, s.sent, static_cast<int64_t>(s.under_way)}, at::kLong);
    EffectiveRanks effective;
    for (const Fragment& stripe : s.stripes) {
      effective.sum += stripe.last().effective.sum;
      effective.matrices += stripe.last().effective.matrices;
    }
    state["own." + name + ".trained"] =
        at::tensor({s.trained.samples, s.trained.steps, s.sent_trained.samples, s.sent_trained.steps}, at::kDouble);
    state[name + ".effective_ranks"] = at::tensor({effective.sum, effective.matrices}, at::kDouble);
  }
  return state;
}

TensorMap DiLoCoX::state() {
  const Meeting meeting(place_);
  const Awaiting awaiting(place_, place_.begun);
  const std::exception_ptr error = awaitAll(fragments_, *vote_);
  if (vote_->isLost(error != nullptr)) giveUp();
  vote_->onState(groups_, error ? reasonOf(error) : "", report_.outer_steps);
  if (error) std::rethrow_exception(error);
  TensorMap state = counters();
  for (const FragmentSchedule& s : fragments_) {
    for (const Fragment& stripe : s.stripes)
      state.merge(stripe.state());
  }
  return state;
}

void DiLoCoX::stateFailed(const std::string& error) {
  const Meeting meeting(place_);
  const Awaiting awaiting(place_, place_.begun);
  if (vote_->isLost(awaitAll(fragments_, *vote_) != nullptr)) giveUp();
  vote_->onState(groups_, error.empty() ? "no reason was given" : error, report_.outer_steps);
}

void DiLoCoX::load(const TensorMap& state) {
  for (const auto& [key, expected] : counters()) {
    const auto found = state.find(key);
    if (found == state.end()) throw ValueError("DiLoCoX: load: expected '" + key + "' in the state, got none");
    if (found->second.scalar_type() != expected.scalar_type() ||
        (key != "effective_ranks" && found->second.sizes() != expected.sizes())) {
      throw ValueError(c10::str("DiLoCoX: load: ", key, ": expected ", expected.toString(), " of shape ",
                                expected.sizes(), ", got ", found->second.toString(), " of shape ",
                                found->second.sizes()));
    }
  }
  const auto number = [&](const char* key) { return state.at(key).item<int64_t>(); };
  if (number("mode") != static_cast<int64_t>(options_.mode)) {
    throw ValueError(c10::str(
        "DiLoCoX: load: mode: expected ", outerModeName(options_.mode), ", got the state of ",
        number("mode") < 0 || number("mode") > 2 ? "another" : outerModeName(static_cast<OuterMode>(number("mode")))));
  }
  for (const auto& [key, expected] : {std::pair("fragments", options_.fragments), std::pair("delay", options_.delay)}) {
    if (number(key) != expected)
      throw ValueError(c10::str("DiLoCoX: load: ", key, ": expected ", expected, ", got ", number(key)));
  }
  if (!groups_.empty() && number("ranks") != groups_[0]->size()) {
    throw ValueError(c10::str("DiLoCoX: load: expected the state of a group of ", groups_[0]->size(),
                              " ranks, got one of ", number("ranks")));
  }
  for (const FragmentSchedule& s : fragments_) {
    for (const Fragment& stripe : s.stripes)
      stripe.check(state);
  }
  for (FragmentSchedule& s : fragments_) {
    for (Fragment& stripe : s.stripes)
      stripe.drop();
  }
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const std::string name = "fragment" + std::to_string(f);
    const at::Tensor kept = state.at(name).contiguous();
    const int64_t* at = kept.const_data_ptr<int64_t>();
    FragmentSchedule& s = fragments_[f];
    const at::Tensor sums = state.at(name + ".effective_ranks");
    EffectiveRanks effective{sums[0].item<double>(), sums[1].item<double>()};
    for (Fragment& stripe : s.stripes) {
      stripe.load(state, at[3] == 0 ? Fragment::Phase::idle : Fragment::Phase::landed, effective);
      effective = {};  // of all stripes: with the first
    }
    s.under_way = at[3] != 0;
    clock_.start(s);
    const at::Tensor trained = state.at("own." + name + ".trained").contiguous();
    const double* of = trained.const_data_ptr<double>();
    s.trained = {of[0], of[1]};
    s.sent_trained = {of[2], of[3]};
    s.send_at = at[0];
    s.apply_at = at[1];
    s.sent = at[2];
  }
  const at::Tensor effective = state.at("effective_ranks").contiguous();
  adaptation_.set({effective.const_data_ptr<double>(), effective.const_data_ptr<double>() + effective.numel()});
  clock_.steps = number("steps");
  clock_.resume();
  history_.applied = number("applied");
  // Where the interval does not adapt it follows the options, as the rank does.
  clock_.sync_every =
      options_.adapt_sync_every ? std::min(number("sync_every"), options_.sync_every) : options_.sync_every;
  report_.outer_steps = number("outer_steps");
  setRanks();
}

}  // namespace lowcomm

#include "diloco/diloco.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include <c10/core/GradMode.h>

#include "base/error.h"
#include "base/hashes.h"
#include "collective/collectives.h"

namespace lowcomm {
namespace {

using Clock = std::chrono::steady_clock;

void expectAveraged(const std::vector<OuterParameter>& parameters) {
  for (const OuterParameter& parameter : parameters) {
    if (parameter.tensor.is_floating_point() && parameter.tensor.layout() == at::kStrided) continue;
    throw TypeError("DiLoCoX: " + parameter.name + ": expected a dense floating-point tensor, got " +
                    std::string(parameter.tensor.toString()));
  }
}

DiLoCoXOptions averaging(const DiLoCoXOptions& options) {
  DiLoCoXOptions exact;
  exact.sync_every = options.sync_every;
  exact.mode = options.mode == OuterMode::sync ? OuterMode::sync : OuterMode::proceed;
  exact.sync_warmup = options.sync_warmup;
  exact.lr = 1;
  exact.momentum = 0;
  return exact;
}

// Returns when all others have been told.
void tellStripes(const std::string& error, const std::vector<std::shared_ptr<OpQueue>>& stripes) {
  KeyValues description{{{"error", error.substr(0, 1000)}}};
  for (const std::shared_ptr<OpQueue>& stripe : stripes) {
    try {
      Ticket(*stripe, "DiLoCoX", 1, [&](OpContext& op) { lowcomm::agree(op, description); }).wait();
    } catch (const PeerError&) {
      // It names this rank's own error, or a peer that is lost, and this rank throws its own in any case.
    }
  }
}

}  // namespace

DiLoCoX::DiLoCoX(std::vector<OuterParameter> parameters, std::shared_ptr<OpQueue> group, DiLoCoXOptions options,
                 std::shared_ptr<OpQueue> cluster, std::vector<OuterParameter> buffers)
    : DiLoCoX(std::move(parameters), group ? std::vector{group} : std::vector<std::shared_ptr<OpQueue>>(),
              std::move(options), OuterSite{std::move(cluster), {}, {}}, std::move(buffers)) {}

DiLoCoX::DiLoCoX(std::vector<OuterParameter> parameters, std::vector<std::shared_ptr<OpQueue>> stripes,
                 DiLoCoXOptions options, OuterSite site, std::vector<OuterParameter> buffers)
    : options_(std::move(options)),
      buffer_options_(averaging(options_)),
      groups_(std::move(stripes)),
      clock_(options_, site.ranks),
      adaptation_(options_) {
  history_.formed = !groups_.empty();
  std::exception_ptr mistake;
  const auto attempt = [&](const auto& f) {
    try {
      f();
    } catch (const std::exception&) {  // memory that is too little, too
      mistake = std::current_exception();
    }
  };
  attempt([&] {
    options_.check();
    if (parameters.empty()) throw ValueError("DiLoCoX: expected parameters, got none");
    expectAveraged(parameters);
    expectAveraged(buffers);
  });
  if (mistake) {
    refuse(reasonOf(mistake), groups_, site);
    std::rethrow_exception(mistake);
  }
  attempt([&] {
    model_ = std::make_unique<SiteModel>(std::move(parameters), site, options_.fragments, options_.rank,
                                         /*same_values=*/true);
    buffers_ = std::make_unique<SiteModel>(std::move(buffers), site, 1, 0, /*same_values=*/false);
    vote_ = std::make_unique<SiteVote>(site.ranks, *model_);
    for (int64_t f = 0; f < options_.fragments; ++f)
      model_->collect(f);  // θ̄ begins from there
    buffers_->collect(0);
    if (!groups_.empty() && groups_.size() != model_->stripes().size()) {
      throw ValueError(c10::str("DiLoCoX: expected a group for each of the ", model_->stripes().size(),
                                " stripes of this rank, got ", groups_.size()));
    }
    for (int64_t f = 0; f < options_.fragments; ++f)
      fragments_.emplace_back(*model_, options_, f, /*buffers=*/false);
    if (!buffers_->empty()) fragments_.emplace_back(*buffers_, buffer_options_, 0, /*buffers=*/true);
    clock_.startAll(fragments_);
    report_.sync_every = clock_.sync_every;
    report_.rank = adaptation_.rank();
    report_.stripe_elements = model_->stripeElements();
    report_.stripes = model_->stripes();
  });
  if (mistake) {
    tellStripes(reasonOf(mistake), groups_);
    std::rethrow_exception(mistake);
  }
  agree(/*values=*/true);
  history_.join(groups_);
  history_.takePart();
}

void DiLoCoX::refuse(const std::string& error, const std::vector<std::shared_ptr<OpQueue>>& stripes,
                     const OuterSite& site) {
  if (site.ranks) SiteModel({}, site, 0, 0, false, error);
  tellStripes(error, stripes);
}

std::string DiLoCoX::agreed() const {
  return options_.text() + " parameters: " + model_->shapes() + "buffers: " + buffers_->shapes() +
         "pieces: " + model_->text();
}

uint32_t DiLoCoX::checksum(size_t stripe) const {
  uint32_t sum = 0;
  for (const FragmentSchedule& s : fragments_)
    sum = sum * 31 + s.stripes[stripe].checksum();
  return sum;
}

void DiLoCoX::agree(bool values) {
  for (size_t stripe = 0; stripe < groups_.size(); ++stripe) {
    KeyValues description = options_.fields();
    description.fields.emplace_back("parameters", model_->text() + "; buffers " + buffers_->text());
    description.fields.emplace_back("stripe", std::to_string(model_->stripes()[stripe]));
    if (values)
      description.fields.emplace_back("parameters' values (seed alike or broadcast)", std::to_string(checksum(stripe)));
    Ticket(*groups_[stripe], "DiLoCoX", 1, [&](OpContext& op) { lowcomm::agree(op, description); }).wait();
  }
}

OuterReport DiLoCoX::report() const {
  OuterReport report = report_;
  for (const FragmentSchedule& s : fragments_) {
    for (const Fragment& stripe : s.stripes)
      report.memory += stripe.last().memory;
  }
  return report;
}

bool DiLoCoX::step(double samples) {
  if (!history_.formed) throw ValueError("DiLoCoX: step: expected a group, got none: regroup() first");
  if (!(samples > 0) || std::isinf(samples))
    throw ValueError("DiLoCoX: step: samples: expected a number above 0, got " + std::to_string(samples));
  clock_.stepMade();
  const auto start = Clock::now();
  const double waited_before = report_.total_waited_s;
  bool any = false;
  try {
    for (FragmentSchedule& s : fragments_)
      s.trained += {samples, 1};
    const std::vector<bool> due = clock_.due(fragments_);
    for (size_t f = 0; f < fragments_.size(); ++f) {
      FragmentSchedule& s = fragments_[f];
      if (s.apply_at == clock_.steps) {
        s.model.collect(s.number);
        waitForAverage(s);
        applyAverage(s, Move::by_mode);
        any = true;
      }
      if (due[f]) {
        s.model.collect(s.number);
        outerStep(s, options_.mode == OuterMode::sync || s.sent < options_.sync_warmup);
        any = true;
      }
    }
    if (any) vote_->onErrors(clock_.steps);
  } catch (...) {
    giveUp();
    throw;
  }
  if (any) report_.local_s = secondsSince(start) - (report_.total_waited_s - waited_before);
  clock_.stepEnds();
  return any;
}

// Forms the pseudo-gradient, compresses it and starts its average. The average that was under way takes an outer step
// first, in the same pass over memory; one that training waits for takes it at once.
void DiLoCoX::outerStep(FragmentSchedule& s, bool waits) {
  const auto number = static_cast<uint32_t>(++s.sent);
  const Trained trained = std::exchange(s.trained, {});
  // With a quorum by samples times samples a step: steps of larger batches are worth more each (Decoupled DiLoCo,
  // arXiv 2604.21428).
  const double weight = options_.quorum > 0         ? trained.samples * trained.samples / trained.steps
                        : options_.sync_seconds > 0 ? trained.samples
                                                    : 0;
  const auto eachStripe = [&](const auto& send) {
    for (size_t stripe = 0; stripe < s.stripes.size(); ++stripe)
      vote_->keepError([&] { send(s.stripes[stripe], *groups_[stripe]); });
  };
  s.sent_trained += trained;
  if (!s.buffers) ++place_.begun;
  if (s.under_way) {
    waitForAverage(s);
    s.sent_trained = trained;
    s.message = place_.begun;
    eachStripe([&](Fragment& stripe, OpQueue& group) { stripe.applyAndSend(group, number, weight); });
    s.model.spread(s.number);
    if (!s.buffers) startCheck();
  } else {
    eachStripe([&](Fragment& stripe, OpQueue& group) { stripe.send(group, number, /*marks=*/!waits, weight); });
    s.under_way = true;
    s.message = place_.begun;
    if (waits) {
      waitForAverage(s);
      applyAverage(s, Move::whole);
    } else {
      voteOnAverage(s, {}, nullptr);
    }
  }
  const int64_t delay = options_.delayOf(clock_.sync_every);
  if (s.under_way && delay < clock_.sync_every) s.apply_at = clock_.steps + delay;
  clock_.start(s);
  if (s.buffers) {
    s.send_at = fragments_.front().send_at;
    return;
  }
  ++report_.outer_steps;
  report_.sync_every = clock_.sync_every;
  report_.rank = adaptation_.rank();
  if (!groups_.empty()) report_.participating = groups_[0]->size();
}

// Waits for the averages of all stripes, on this rank and on the others of its site.
void DiLoCoX::waitForAverage(FragmentSchedule& s) {
  const Awaiting awaiting(place_, s.message);
  EffectiveRanks effective;
  std::exception_ptr error;
  const auto start = Clock::now();
  double waited = 0;
  uint64_t sent = 0;
  for (Fragment& stripe : s.stripes) {
    try {
      vote_->await(stripe);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
    effective.sum += stripe.last().effective.sum;
    effective.matrices += stripe.last().effective.matrices;
    waited += stripe.last().waited_s;
    sent += stripe.last().moved.wire_bytes;
  }
  voteOnAverage(s, effective, error);
  if (vote_->ranks()) waited = secondsSince(start);  // for other ranks' stripes, too
  report_.total_waited_s += waited;
  report_.total_sent_bytes += sent;
  if (s.buffers) return;
  report_.waited_s = waited;
  report_.sent_bytes = sent;
}

// The outer step by averages that have come.
void DiLoCoX::applyAverage(FragmentSchedule& s, Move move) {
  for (Fragment& stripe : s.stripes)
    stripe.apply(move);
  s.under_way = false;
  s.sent_trained = {};
  s.apply_at = -1;
  s.model.spread(s.number);
  if (!s.buffers) startCheck();
}

// An outer step's averages have come, or (`mine` empty, no error) it had none here: then the others of the site may
// have some, as after an error of this rank alone, and wait for its vote. So every outer step has one. Rank and
// interval follow the averages.
void DiLoCoX::voteOnAverage(const FragmentSchedule& s, const EffectiveRanks& mine, const std::exception_ptr& error) {
  const EffectiveRanks all = vote_->onAverage(mine, error, clock_.steps);
  if (s.buffers || !(options_.adapt_rank || options_.adapt_sync_every)) return;
  if (all.matrices > 0) {  // vectors alone have no rank, and do not change the matrices'
    adaptation_.add(all.mean());
    report_.effective_rank = all.mean();
  }
  // Parts of a model see other averages: without one interval for all of them a stage would wait for ever.
  const double rank = adaptation_.rank();
  clock_.sync_every = adaptation_.syncEvery(options_.adapt_sync_every ? vote_->mean(rank) : rank);
  setRanks();
}

void DiLoCoX::setRanks() {
  if (!options_.adapt_rank) return;  // r_t may still set the interval
  for (FragmentSchedule& s : fragments_) {
    for (Fragment& stripe : s.stripes)
      stripe.setRank(std::llround(adaptation_.rank()));
  }
}

// After an outer step was applied, every so often: compares the ranks' θ̄ on the control lane. The answer is waited for
// when all that was queued before it has come: on all ranks at the same step.
void DiLoCoX::startCheck() {
  ++history_.applied;
  for (; !checks_.empty() && checks_.front().first + options_.fragments <= history_.applied; checks_.pop_front())
    vote_->keepError([&] { checks_.front().second.wait(); });
  if (options_.check_every == 0 || history_.applied % options_.check_every != 0) return;
  for (size_t stripe = 0; stripe < groups_.size(); ++stripe) {
    vote_->keepError([&] {
      KeyValues description{{{"outer step", std::to_string(history_.applied)},
                             {"outer parameters' checksum", std::to_string(checksum(stripe))}}};
      checks_.emplace_back(history_.applied, Ticket(*groups_[stripe], "DiLoCoX check", 1,
                                                    [description](OpContext& op) { lowcomm::agree(op, description); }));
    });
  }
}

void DiLoCoX::restore() {
  const c10::NoGradGuard no_grad;
  for (FragmentSchedule& s : fragments_) {
    for (Fragment& stripe : s.stripes)
      stripe.restore();
    s.model.spread(s.number);
  }
}

void DiLoCoX::showOuter() {
  const c10::NoGradGuard no_grad;
  each([](const OuterParameter& piece, const at::Tensor& outer) { piece.tensor.detach().copy_(outer); });
  for (FragmentSchedule& s : fragments_)
    s.model.spread(s.number);
}

void DiLoCoX::each(const std::function<void(const OuterParameter&, const at::Tensor&)>& call) {
  for (FragmentSchedule& s : fragments_) {
    for (Fragment& stripe : s.stripes)
      stripe.each(call);
  }
}

}  // namespace lowcomm

#include "diloco/diloco.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include <c10/core/GradMode.h>

#include "base/error.h"
#include "base/hashes.h"
#include "collective/collectives.h"

namespace lowcomm {
namespace {

// The options that must be equal on all ranks, as text.
std::string textOf(const DiLoCoXOptions& o) {
  return c10::str("sync_every=", o.sync_every, " sync_seconds=", o.sync_seconds, " mode=", outerModeName(o.mode),
                  " fragments=", o.fragments, " fragment_sync_delay=", o.delay, " fragment_update_alpha=", o.alpha,
                  " sync_warmup=", o.sync_warmup, " outer_lr=", o.lr, " outer_momentum=", o.momentum,
                  " codec=", o.codec.str(), " projection_codec=", o.projection.str(),
                  " error_feedback=", o.error_feedback, " eight_bits=", o.eight_bits, " rank=", o.rank,
                  " adapt_rank=", o.adapt_rank, " adapt_sync_every=", o.adapt_sync_every,
                  " min_rank=", o.min_rank, " check_every=", o.check_every, " seed=", o.seed);
}

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

}  // namespace

DiLoCoX::DiLoCoX(std::vector<OuterParameter> parameters, std::shared_ptr<OpQueue> group, DiLoCoXOptions options,
                 std::shared_ptr<OpQueue> cluster, std::vector<OuterParameter> buffers)
    : DiLoCoX(std::move(parameters), group ? std::vector{group} : std::vector<std::shared_ptr<OpQueue>>(),
              std::move(options), OuterSite{std::move(cluster), {}, {}}, std::move(buffers)) {}

DiLoCoX::DiLoCoX(std::vector<OuterParameter> parameters, std::vector<std::shared_ptr<OpQueue>> stripes,
                 DiLoCoXOptions options, OuterSite site, std::vector<OuterParameter> buffers)
    : options_(std::move(options)),
      site_(std::move(site)),
      groups_(std::move(stripes)),
      buffer_options_(averaging(options_)),
      adaptation_(options_),
      formed_(!groups_.empty()),
      sync_every_(options_.sync_every),
      rank_(static_cast<double>(options_.rank)) {
  report_.sync_every = sync_every_;
  report_.rank = rank_;
  std::string error;
  std::exception_ptr mistake;
  const auto attempt = [&](const auto& f) {
    try {
      f();
    } catch (const std::exception&) {  // memory that is too little, too
      mistake = std::current_exception();
      error = reasonOf(mistake);
    }
  };
  attempt([&] {
    options_.check();
    if (parameters.empty()) throw ValueError("DiLoCoX: expected parameters, got none");
    expectAveraged(parameters);
    expectAveraged(buffers);
  });
  if (mistake) {
    refuse(error, groups_, site_);
    std::rethrow_exception(mistake);
  }
  attempt([&] {
    model_ = std::make_unique<SiteModel>(std::move(parameters), site_, options_.fragments, options_.rank,
                                         /*same_values=*/true);
    buffers_ = std::make_unique<SiteModel>(std::move(buffers), site_, 1, 0, /*same_values=*/false);
    for (int64_t f = 0; f < options_.fragments; ++f)
      model_->collect(f);  // θ̄ begins from there
    buffers_->collect(0);
    if (!groups_.empty() && groups_.size() != model_->stripes().size()) {
      throw ValueError(c10::str("DiLoCoX: expected a group for each of the ", model_->stripes().size(),
                                " stripes of this rank, got ", groups_.size()));
    }
    for (int64_t f = 0; f < options_.fragments; ++f)
      fragments_.push_back(scheduled(*model_, options_, f, /*buffers=*/false));
    of_parameters_ = fragments_.size();
    if (!buffers_->empty()) fragments_.push_back(scheduled(*buffers_, buffer_options_, 0, /*buffers=*/true));
    startIntervals();
    report_.stripe_elements = model_->stripeElements();
    report_.stripes = model_->stripes();
    measure();
  });
  if (mistake) {
    tellStripes(error, groups_);
    std::rethrow_exception(mistake);
  }
  agree(/*values=*/true);
}

DiLoCoX::~DiLoCoX() = default;

DiLoCoX::FragmentSchedule DiLoCoX::scheduled(SiteModel& model, const DiLoCoXOptions& options, int64_t number,
                                             bool buffers) const {
  FragmentSchedule s{model, number, {}, buffers};
  for (size_t stripe = 0; stripe < model.stripes().size(); ++stripe)
    s.stripes.emplace_back(options, model.pieces(stripe, number));
  return s;
}

std::string DiLoCoX::agreed() const {
  return textOf(options_) + " parameters: " + model_->shapes() + "buffers: " + buffers_->shapes() +
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
    KeyValues description;
    description.fields = {{"options", textOf(options_)},
                          {"parameters", model_->text() + "; buffers " + buffers_->text()},
                          {"stripe", std::to_string(model_->stripes()[stripe])}};
    if (values)
      description.fields.emplace_back("parameters' values (seed alike or broadcast)", std::to_string(checksum(stripe)));
    Ticket(*groups_[stripe], "DiLoCoX", 1, [&](OpContext& op) { lowcomm::agree(op, description); }).wait();
  }
}

bool DiLoCoX::step(double samples) {
  if (!formed_) throw ValueError("DiLoCoX: step: expected a group, got none: regroup() first");
  if (!(samples > 0) || std::isinf(samples))
    throw ValueError("DiLoCoX: step: samples: expected a number above 0, got " + std::to_string(samples));
  ++steps_;
  const auto start = Clock::now();
  if (const auto ended = std::exchange(step_ended_, {}); ended != Clock::time_point()) {
    const double seconds = std::chrono::duration<double>(start - ended).count();
    step_s_ = step_s_ == 0 ? seconds : .9 * step_s_ + .1 * std::min(seconds, 2 * step_s_);
  }
  const double waited_before = report_.total_waited_s;
  bool any = false;
  try {
    for (FragmentSchedule& s : fragments_)
      s.samples += samples;
    const std::vector<bool> due = this->due();
    for (size_t f = 0; f < fragments_.size(); ++f) {
      FragmentSchedule& s = fragments_[f];
      if (s.apply_at == steps_) {
        s.model.collect(s.number);
        arrive(s, Move::by_mode);
        any = true;
      }
      if (due[f]) {
        s.model.collect(s.number);
        outerStep(s);
        any = true;
      }
    }
    if (any) agreeOnErrors();
  } catch (...) {
    giveUp();
    throw;
  }
  if (any) report_.local_s = secondsSince(start) - (report_.total_waited_s - waited_before);
  step_ended_ = Clock::now();
  return any;
}

void DiLoCoX::outerStep(FragmentSchedule& s) {
  const auto number = static_cast<uint32_t>(++s.sent);
  const double weight = weightOf(s);
  const auto send = [&](bool marks) {
    for (size_t stripe = 0; stripe < s.stripes.size(); ++stripe)
      keepError([&] { s.stripes[stripe].send(*groups_[stripe], number, marks, weight); });
    s.under_way = true;
  };
  if (s.under_way) {  // the message before, all the interval long
    landed(s);
    s.sent_samples = weight;
    for (size_t stripe = 0; stripe < s.stripes.size(); ++stripe)
      keepError([&] { s.stripes[stripe].applyAndSend(*groups_[stripe], number, weight); });
    s.model.spread(s.number);
    if (!s.buffers) startCheck();
  } else if (options_.mode == OuterMode::sync || s.sent <= options_.sync_warmup) {
    send(/*marks=*/false);
    arrive(s, Move::whole);
  } else {
    send(/*marks=*/true);
    voteOnAverage(s, {}, nullptr);
  }
  const int64_t delay = options_.delayOf(sync_every_);
  if (s.under_way && delay < sync_every_) s.apply_at = steps_ + delay;
  startInterval(s);
  if (s.buffers) {
    s.send_at = fragments_.front().send_at;
    return;
  }
  ++report_.outer_steps;
  report_.sync_every = sync_every_;
  report_.rank = rank_;
  if (!groups_.empty()) report_.participating = groups_[0]->size();
}

void DiLoCoX::arrive(FragmentSchedule& s, Move move) {
  landed(s);
  for (Fragment& stripe : s.stripes)
    stripe.apply(move);
  s.under_way = false;
  s.sent_samples = 0;
  s.apply_at = -1;
  s.model.spread(s.number);
  if (!s.buffers) startCheck();
}

// Waits for the averages of all stripes, and adapts to them.
void DiLoCoX::landed(FragmentSchedule& s) {
  EffectiveRanks effective;
  std::exception_ptr error = std::exchange(kept_error_, nullptr);
  const auto start = Clock::now();
  double waited = 0;
  uint64_t sent = 0;
  for (Fragment& stripe : s.stripes) {
    try {
      awaitInSite(stripe);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
    effective.sum += stripe.effectiveRanks().sum;
    effective.matrices += stripe.effectiveRanks().matrices;
    waited += stripe.waited();
    sent += stripe.moved().wire_bytes;
  }
  voteOnAverage(s, effective, error);
  if (site_.ranks) waited = secondsSince(start);  // for other ranks' stripes, too
  report_.total_waited_s += waited;
  report_.total_sent_bytes += sent;
  measure();
  if (s.buffers) return;
  report_.waited_s = waited;
  report_.sent_bytes = sent;
}

void DiLoCoX::measure() {
  report_.memory = {};
  for (const FragmentSchedule& s : fragments_) {
    for (const Fragment& stripe : s.stripes)
      report_.memory += stripe.memory();
  }
}

// After an outer step was applied, every so often: the ranks' θ̄ are compared on the control lane. The answer is looked
// at once all that was queued before it has landed: on all ranks at the same step.
void DiLoCoX::startCheck() {
  ++applied_;
  for (; !checks_.empty() && checks_.front().first + static_cast<int64_t>(of_parameters_) <= applied_;
       checks_.pop_front())
    keepError([&] { checks_.front().second.wait(); });
  if (options_.check_every == 0 || applied_ % options_.check_every != 0) return;
  for (size_t stripe = 0; stripe < groups_.size(); ++stripe) {
    keepError([&] {
      KeyValues description;
      description.fields = {{"outer step", std::to_string(applied_)},
                            {"outer parameters' checksum", std::to_string(checksum(stripe))}};
      checks_.emplace_back(applied_, Ticket(*groups_[stripe], "DiLoCoX check", 1,
                                            [description](OpContext& op) { lowcomm::agree(op, description); }));
    });
  }
}

// Drops the messages under way. Training since then stays in the parameters, and counts from θ̄ again, as its samples
// do.
void DiLoCoX::giveUp() {
  for (FragmentSchedule& s : fragments_) {
    for (Fragment& stripe : s.stripes)
      stripe.drop();
    if (s.under_way) s.samples += std::exchange(s.sent_samples, 0);
    s.under_way = false;
    s.apply_at = -1;
    if (s.send_at <= steps_) startInterval(s);
  }
  // With an interval by the clock, sites could disagree about the next fragment: some ended this interval by their
  // limit of steps.
  if (options_.sync_seconds > 0) startIntervals();
  checks_.clear();
  kept_error_ = nullptr;
}

void DiLoCoX::applyAll(Move move) {
  try {
    for (FragmentSchedule& s : fragments_) {
      if (s.under_way) {
        s.model.collect(s.number);
        arrive(s, move);
      } else if (options_.mode != OuterMode::sync) {
        voteOnAverage(s, {}, nullptr);
      }
    }
    for (; !checks_.empty(); checks_.pop_front())
      keepError([&] { awaitInSite(checks_.front().second); });
    agreeOnErrors();
  } catch (...) {
    giveUp();
    throw;
  }
}

void DiLoCoX::quiesce() {
  applyAll(Move::keeping);
  leaveGroups();
}

// A rank that closed its connections now would take from the others what they have not read yet.
void DiLoCoX::leaveGroups() {
  KeyValues description;
  description.fields = {{"outer step", std::to_string(applied_)}};
  for (const std::shared_ptr<OpQueue>& group : groups_) {
    keepError([&] {
      Ticket op(*group, "DiLoCoX: leaving the group", 1,
                [description](OpContext& context) { lowcomm::agree(context, description); });
      awaitInSite(op);
    });
  }
  agreeOnErrors();
}

void DiLoCoX::finish() {
  applyAll(Move::whole);
  leaveGroups();
  restore();
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

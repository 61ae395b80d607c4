#include "optim/diloco.h"

#include <chrono>
#include <utility>

#include <c10/core/GradMode.h>

#include "base/error.h"
#include "base/hashes.h"
#include "collective/collectives.h"

namespace lowcomm {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The options that must be equal on all ranks, as text.
std::string textOf(const DiLoCoXOptions& o) {
  return c10::str("sync_every=", o.sync_every, " mode=", outerModeName(o.mode), " fragments=", o.fragments,
                  " fragment_sync_delay=", o.delay, " fragment_update_alpha=", o.alpha, " sync_warmup=", o.sync_warmup,
                  " outer_lr=", o.lr, " outer_momentum=", o.momentum, " codec=", o.codec.str(),
                  " projection_codec=", o.projection.str(), " error_feedback=", o.error_feedback,
                  " eight_bits=", o.eight_bits, " rank=", o.rank, " adapt_rank=", o.adapt_rank,
                  " adapt_sync_every=", o.adapt_sync_every, " min_rank=", o.min_rank,
                  " min_sync_every=", o.min_sync_every, " window=", o.window, " energy=", o.energy,
                  " check_every=", o.check_every, " seed=", o.seed);
}

std::string shapesOf(const std::vector<OuterParameter>& parameters) {
  std::string text;
  for (const OuterParameter& parameter : parameters)
    text += c10::str(parameter.name, " ", parameter.tensor.sizes(), "\n");
  return c10::str(parameters.size(), ", hash ", fnv1a(text));
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
    : options_(std::move(options)),
      group_(std::move(group)),
      cluster_(std::move(cluster)),
      buffer_options_(averaging(options_)),
      adaptation_(options_),
      sync_every_(options_.sync_every),
      rank_(static_cast<double>(options_.rank)) {
  report_.sync_every = sync_every_;
  report_.rank = rank_;
  std::string error;
  std::exception_ptr mistake;
  try {
    options_.check();
    if (parameters.empty()) throw ValueError("DiLoCoX: expected parameters, got none");
    if (options_.fragments > static_cast<int64_t>(parameters.size())) {
      throw ValueError(c10::str("DiLoCoX: fragments: expected at most the number of parameters, ", parameters.size(),
                                ", got ", options_.fragments));
    }
    shapes_ = shapesOf(parameters) + "; buffers " + shapesOf(buffers);
    // In order, of about the same number of elements each: what is near in the model travels together.
    int64_t elements = 0, taken = 0;
    for (const OuterParameter& parameter : parameters)
      elements += parameter.tensor.numel();
    uint32_t number = 0;
    size_t at = 0;
    for (int64_t f = 0; f < options_.fragments; ++f) {
      std::vector<OuterParameter> part;
      const size_t left_over = static_cast<size_t>(options_.fragments - f - 1);
      do {
        taken += parameters[at].tensor.numel();
        part.push_back(parameters[at++]);
      } while (at + left_over < parameters.size() &&
               (left_over == 0 || taken * options_.fragments < elements * (f + 1)));
      const auto count = static_cast<uint32_t>(part.size());
      fragments_.push_back(
          {Fragment(options_, std::move(part), number), false, sync_every_ * (f + 1) / options_.fragments});
      number += count;
    }
    of_parameters_ = fragments_.size();
    if (!buffers.empty())
      fragments_.push_back({Fragment(buffer_options_, std::move(buffers), number), true, fragments_[0].send_at});
  } catch (const ValueError& caught) {
    error = caught.what();
    mistake = std::current_exception();
  } catch (const TypeError& caught) {
    error = caught.what();
    mistake = std::current_exception();
  }
  // A rank with a mistake tells the others before it throws: they are in the same call.
  if (group_) agree(error, /*values=*/true);
  if (mistake) std::rethrow_exception(mistake);
}

DiLoCoX::~DiLoCoX() = default;

std::string DiLoCoX::agreed() const {
  return textOf(options_) + " parameters=" + shapes_;
}

uint32_t DiLoCoX::checksum() const {
  uint32_t sum = 0;
  for (const FragmentSchedule& s : fragments_)
    sum = sum * 31 + s.fragment.checksum();
  return sum;
}

// Where this rank has an `error`, it returns when all others have been told.
void DiLoCoX::agree(const std::string& error, bool values) {
  KeyValues description;
  if (!error.empty()) {
    description.fields = {{"error", error.substr(0, 1000)}};
  } else {
    description.fields = {{"options", textOf(options_)}, {"parameters", shapes_}};
    if (values) description.fields.emplace_back("parameters' values", std::to_string(checksum()));
  }
  try {
    Ticket(*group_, "DiLoCoX", 1, [&](OpContext& op) { lowcomm::agree(op, description); }).wait();
  } catch (const PeerRefusal&) {
    if (error.empty()) throw;
  }
}

bool DiLoCoX::step() {
  if (!group_) throw ValueError("DiLoCoX: step: expected a group, got none: regroup() first");
  ++steps_;
  const auto start = Clock::now();
  const double waited_before = waited_s_;
  bool any = false;
  try {
    for (FragmentSchedule& s : fragments_) {
      if (s.apply_at == steps_) {
        arrive(s, Move::by_mode);
        any = true;
      }
      if (s.send_at == steps_) {
        outerStep(s);
        any = true;
      }
    }
  } catch (...) {
    giveUp();
    throw;
  }
  if (any) report_.local_s = since(start) - (waited_s_ - waited_before);
  if (late_) std::rethrow_exception(std::exchange(late_, nullptr));
  return any;
}

void DiLoCoX::outerStep(FragmentSchedule& s) {
  const auto number = static_cast<uint32_t>(++s.sent);
  if (s.fragment.phase() != Fragment::Phase::idle) {  // the message before, all the interval long under way
    landed(s);
    s.fragment.applyAndSend(*group_, number);
    if (!s.buffers) startCheck();
  } else if (options_.mode == OuterMode::sync || s.sent <= options_.sync_warmup) {
    s.fragment.send(*group_, number, /*marks=*/false);
    arrive(s, Move::whole);
  } else {
    s.fragment.send(*group_, number, /*marks=*/true);
    agreeWithout(s);
    const int64_t delay = options_.delayOf(sync_every_);
    if (delay < sync_every_) s.apply_at = steps_ + delay;
  }
  s.send_at = steps_ + sync_every_;
  if (s.buffers) {
    s.send_at = fragments_.front().send_at;
    return;
  }
  ++report_.outer_steps;
  report_.participating = group_->size();
  report_.sync_every = sync_every_;
  report_.rank = rank_;
}

void DiLoCoX::arrive(FragmentSchedule& s, Move move) {
  landed(s);
  s.fragment.apply(move);
  s.apply_at = -1;
  if (!s.buffers) startCheck();
}

// Waits for the average, and adapts to it.
void DiLoCoX::landed(FragmentSchedule& s) {
  if (s.buffers) {
    s.fragment.wait();
    return;
  }
  const bool adapts = options_.adapt_rank || options_.adapt_sync_every;
  const std::vector<double> before = adaptation_.effectiveRanks();
  const double rank_before = rank_;
  bool told = false;
  try {
    s.fragment.wait();
    if (adapts) {
      // Vectors alone have none, and say nothing of the matrices'.
      if (s.fragment.effectiveRank() > 0) adaptation_.add(s.fragment.effectiveRank());
      try {
        rank_ = adaptation_.rank();
        told = true;
        adapt();
      } catch (...) {
        // The others have this average and apply it: so must a rank whose own rule fails.
        if (agreesInCluster()) throw;
        late_ = std::current_exception();
        rank_ = rank_before;
      }
    }
  } catch (...) {
    adaptation_.set(before);
    rank_ = rank_before;
    if (!told) tellCluster(std::current_exception());
    throw;
  }
  report_.waited_s = s.fragment.waited();
  waited_s_ += report_.waited_s;
  report_.sent_bytes = s.fragment.moved().wire_bytes;
  report_.effective_rank = s.fragment.effectiveRank();
}

// After an outer step was applied, every so often: the ranks' θ̄ are compared, on the control lane and behind no other
// op, and the answer is looked at the next time.
void DiLoCoX::startCheck() {
  ++applied_;
  if (options_.check_every == 0 || applied_ % options_.check_every != 0) return;
  if (check_.pending()) check_.wait();
  KeyValues description;
  description.fields = {{"outer step", std::to_string(applied_)},
                        {"outer parameters' checksum", std::to_string(checksum())}};
  check_ = Ticket(*group_, "DiLoCoX check", 1, [description](OpContext& op) { lowcomm::agree(op, description); });
}

// Drops the messages under way. Training since then stays in the parameters, and counts from θ̄ again.
void DiLoCoX::giveUp() {
  for (FragmentSchedule& s : fragments_) {
    s.fragment.drop();
    s.apply_at = -1;
    if (s.send_at <= steps_) s.send_at = steps_ + sync_every_;
  }
  check_ = Ticket();
}

void DiLoCoX::applyAll(Move move) {
  try {
    for (FragmentSchedule& s : fragments_) {
      if (s.fragment.phase() != Fragment::Phase::idle) {
        arrive(s, move);
      } else if (options_.mode != OuterMode::sync) {
        agreeWithout(s);
      }
    }
    if (check_.pending()) check_.wait();
  } catch (...) {
    giveUp();
    throw;
  }
}

void DiLoCoX::quiesce() {
  applyAll(Move::keeping);
  leaveGroup();
}

// A rank that closed its connections now would take from the others what they have not read yet.
void DiLoCoX::leaveGroup() {
  KeyValues description;
  description.fields = {{"outer step", std::to_string(applied_)}};
  Ticket(*group_, "DiLoCoX: leaving the group", 1, [&](OpContext& op) { lowcomm::agree(op, description); }).wait();
}

void DiLoCoX::finish() {
  applyAll(Move::whole);
  leaveGroup();
  restore();
}

void DiLoCoX::restore() {
  const c10::NoGradGuard no_grad;
  for (FragmentSchedule& s : fragments_)
    s.fragment.restore();
}

void DiLoCoX::each(const std::function<void(const OuterParameter&, const at::Tensor&)>& call) {
  for (FragmentSchedule& s : fragments_)
    s.fragment.each(call);
}

}  // namespace lowcomm

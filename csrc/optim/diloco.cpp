#include "optim/diloco.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include <c10/core/GradMode.h>

#include "codec/error.h"
#include "collective/agree.h"
#include "collective/all_gather.h"
#include "collective/rooted.h"
#include "wire/fnv1a.h"

namespace lowcomm {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What ranks must have alike.
std::string textOf(const OuterOptions& o) {
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

// Every rank's number.
std::vector<double> gathered(double mine, OpQueue& queue, const std::string& what) {
  std::vector<double> all(queue.size());
  Ticket(queue, what, 1, [&](OpContext& op) {
    GatherMessage message{.layouts = {Layout::single(sizeof(double), CodecSpec{})}, .input = &mine};
    message.type_name = "float64";
    message.type_elements = "1";
    for (double& one : all)
      message.outputs.push_back(&one);
    allGather(op, {message});
  }).wait();
  return all;
}

// The mean of every rank's number, the same everywhere: added in rank order.
double meanOf(double mine, OpQueue& queue) {
  double sum = 0;
  for (double one : gathered(mine, queue, "agree on sync_every"))
    sum += one;
  return sum / queue.size();
}

OuterOptions averaging(const OuterOptions& options) {
  OuterOptions exact;
  exact.sync_every = options.sync_every;
  exact.mode = options.mode == OuterMode::sync ? OuterMode::sync : OuterMode::proceed;
  exact.sync_warmup = options.sync_warmup;
  exact.lr = 1;
  exact.momentum = 0;
  return exact;
}

}  // namespace

DiLoCoX::DiLoCoX(std::vector<OuterParameter> parameters, std::shared_ptr<OpQueue> group, OuterOptions options,
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
  for (const Scheduled& s : fragments_)
    sum = sum * 31 + s.fragment.checksum();
  return sum;
}

// Where this rank has an `error`, it returns when all others have been told.
void DiLoCoX::agree(const std::string& error, bool values) {
  Hello hello;
  if (!error.empty()) {
    hello.fields = {{"error", error.substr(0, 1000)}};
  } else {
    hello.fields = {{"options", textOf(options_)}, {"parameters", shapes_}};
    if (values) hello.fields.emplace_back("parameters' values", std::to_string(checksum()));
  }
  try {
    Ticket(*group_, "DiLoCoX", 1, [&](OpContext& op) { lowcomm::agree(op, hello); }).wait();
  } catch (const PeerRefused&) {
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
    for (Scheduled& s : fragments_) {
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

void DiLoCoX::outerStep(Scheduled& s) {
  const auto number = static_cast<uint32_t>(++s.sent);
  if (s.fragment.phase() != Fragment::Phase::idle) {  // the message before, all the interval long under way
    landed(s);
    s.fragment.turn(*group_, number);
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

void DiLoCoX::arrive(Scheduled& s, Move move) {
  landed(s);
  s.fragment.apply(move);
  s.apply_at = -1;
  if (!s.buffers) startCheck();
}

// Waits for the average, and adapts to it.
void DiLoCoX::landed(Scheduled& s) {
  if (s.buffers) {
    s.fragment.settle();
    return;
  }
  const bool adapts = options_.adapt_rank || options_.adapt_sync_every;
  const std::vector<double> before = adaptation_.effectiveRanks();
  const double rank_before = rank_;
  bool told = false;
  try {
    s.fragment.settle();
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
    if (!told) tellCluster();
    throw;
  }
  report_.waited_s = s.fragment.waited();
  waited_s_ += report_.waited_s;
  report_.sent_bytes = s.fragment.moved().wire_bytes;
  report_.effective_rank = s.fragment.effectiveRank();
}

bool DiLoCoX::agreesInCluster() const {
  return cluster_ && options_.adapt_sync_every;
}

// The others of the model wait for this rank's word on sync_every: NaN where there is none.
void DiLoCoX::tellCluster() {
  if (!agreesInCluster()) return;
  try {
    meanOf(std::numeric_limits<double>::quiet_NaN(), *cluster_);
  } catch (...) {
    // The caller throws its own error.
  }
}

// An outer step that no average came with: the others of the model may have one, as after an error of this stage alone,
// and wait for its word. So every outer step has one.
void DiLoCoX::agreeWithout(const Scheduled& s) {
  if (agreesInCluster() && !s.buffers) adapt();
}

void DiLoCoX::adapt() {
  // Shards and stages see other averages: without one interval for all of them a stage would wait for ever.
  const double agreed = agreesInCluster() ? meanOf(rank_, *cluster_) : rank_;
  if (std::isnan(agreed)) {
    throw ValueError(
        "DiLoCoX: expected an average of every shard and stage of the model, got an error of another one's; the outer "
        "step was dropped here, too");
  }
  sync_every_ = adaptation_.syncEvery(agreed);
  if (!options_.adapt_rank) return;
  for (size_t f = 0; f < of_parameters_; ++f)
    fragments_[f].fragment.setRank(std::llround(rank_));
}

// After an outer step was applied, every so often: the ranks' θ̄ are compared, on the control lane and behind no other
// op, and the answer is looked at the next time.
void DiLoCoX::startCheck() {
  ++applied_;
  if (options_.check_every == 0 || applied_ % options_.check_every != 0) return;
  if (check_.pending()) check_.wait();
  Hello hello;
  hello.fields = {{"outer step", std::to_string(applied_)}, {"outer parameters' checksum", std::to_string(checksum())}};
  check_ = Ticket(*group_, "DiLoCoX check", 1, [hello](OpContext& op) { lowcomm::agree(op, hello); });
}

// What is under way is dropped; what was trained since stays in the parameters, and counts from θ̄ again.
void DiLoCoX::giveUp() {
  for (Scheduled& s : fragments_) {
    s.fragment.drop();
    s.apply_at = -1;
    if (s.send_at <= steps_) s.send_at = steps_ + sync_every_;
  }
  check_ = Ticket();
}

void DiLoCoX::regroup(std::shared_ptr<OpQueue> group) {
  giveUp();
  group_ = std::move(group);
  agree("", /*values=*/false);
  const std::vector<double> applied = gathered(static_cast<double>(applied_), *group_, "compare outer steps");
  const std::vector<double> sums = gathered(static_cast<double>(checksum()), *group_, "compare outer parameters");
  const auto alike = [](const std::vector<double>& all) {
    return std::all_of(all.begin(), all.end(), [&](double one) { return one == all[0]; });
  };
  const auto root = std::max_element(applied.begin(), applied.end()) - applied.begin();
  if (applied[root] < 0) {
    throw ValueError(
        "DiLoCoX: regroup: expected a rank with a whole outer state, got only such as were lost while they took it "
        "over: load a checkpoint");
  }
  steps_ = static_cast<int64_t>(gathered(static_cast<double>(steps_), *group_, "compare inner steps")[root]);
  const auto mine = static_cast<size_t>(group_->rank());
  takeFrom(static_cast<int>(root), /*behind=*/applied[mine] != applied[root] || sums[mine] != sums[root],
           /*tensors=*/!alike(applied) || !alike(sums));
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const int64_t place = f < of_parameters_ ? static_cast<int64_t>(f) : 0;  // buffers go with the first
    fragments_[f].send_at = steps_ + sync_every_ * (place + 1) / options_.fragments;
  }
  report_.participating = group_->size();
}

// Counters always; `tensors` where any rank needs them. One that is lost in the middle of that has no state: applied_
// says so until all has come.
void DiLoCoX::takeFrom(int root, bool behind, bool tensors) {
  std::vector<double> effective = adaptation_.effectiveRanks();
  const double known = static_cast<double>(effective.size());
  effective.resize(static_cast<size_t>(gathered(known, *group_, "compare effective ranks")[root]));
  std::vector<double> counters = {static_cast<double>(applied_), static_cast<double>(sync_every_), rank_,
                                  static_cast<double>(report_.outer_steps)};
  for (const Scheduled& s : fragments_)
    counters.push_back(static_cast<double>(s.sent));
  effective.insert(effective.begin(), counters.begin(), counters.end());
  std::vector<BroadcastMessage> messages = {{effective.size(), CodecSpec{}, DType::float64, effective.data(), {}}};
  const auto copy = [&] {
    Ticket(*group_, "take over the outer state", 1, [&](OpContext& op) { broadcast(op, messages, root); }).wait();
    messages.clear();
  };
  copy();
  if (behind) applied_ = -1;
  sync_every_ = static_cast<int64_t>(effective[1]);
  rank_ = effective[2];
  report_.outer_steps = static_cast<int64_t>(effective[3]);
  for (size_t f = 0; f < fragments_.size(); ++f)
    fragments_[f].sent = static_cast<int64_t>(effective[4 + f]);
  adaptation_.set({effective.begin() + static_cast<std::ptrdiff_t>(counters.size()), effective.end()});
  for (Scheduled& s : fragments_) {
    s.fragment.setRank(std::llround(rank_));
    if (!tensors) continue;
    for (at::Tensor& tensor : s.fragment.shared())
      messages.push_back(
          {static_cast<uint64_t>(tensor.numel()), CodecSpec{}, DType::float32, tensor.mutable_data_ptr<float>(), {}});
  }
  if (tensors) {
    copy();
    for (Scheduled& s : fragments_)
      s.fragment.share(behind);
  }
  applied_ = static_cast<int64_t>(effective[0]);
}

void DiLoCoX::applyAll(Move move) {
  try {
    for (Scheduled& s : fragments_) {
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
  part();
}

// A rank that closed its connections now would take from the others what they have not read yet.
void DiLoCoX::part() {
  Hello hello;
  hello.fields = {{"outer step", std::to_string(applied_)}};
  Ticket(*group_, "DiLoCoX: leaving the group", 1, [&](OpContext& op) { lowcomm::agree(op, hello); }).wait();
}

void DiLoCoX::finish() {
  applyAll(Move::whole);
  part();
  restore();
}

void DiLoCoX::restore() {
  const c10::NoGradGuard no_grad;
  for (Scheduled& s : fragments_)
    s.fragment.restore();
}

void DiLoCoX::each(const std::function<void(const OuterParameter&, const at::Tensor&)>& call) {
  for (Scheduled& s : fragments_)
    s.fragment.each(call);
}

TensorMap DiLoCoX::counters() const {
  const auto number = [](int64_t value) { return at::scalar_tensor(value, at::kLong); };
  TensorMap state{{"ranks", number(group_ ? group_->size() : 0)},
                  {"mode", number(static_cast<int64_t>(options_.mode))},
                  {"fragments", number(options_.fragments)},
                  {"delay", number(options_.delay)},
                  {"steps", number(steps_)},
                  {"applied", number(applied_)},
                  {"sync_every", number(sync_every_)},
                  {"rank", at::scalar_tensor(rank_, at::kDouble)},
                  {"outer_steps", number(report_.outer_steps)}};
  state["effective_ranks"] = at::tensor(adaptation_.effectiveRanks(), at::kDouble);
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const Scheduled& s = fragments_[f];
    const std::string name = "fragment" + std::to_string(f);
    state[name] = at::tensor({s.send_at, s.apply_at, s.sent, static_cast<int64_t>(s.fragment.phase())}, at::kLong);
    state[name + ".effective_rank"] = at::scalar_tensor(s.fragment.effectiveRank(), at::kDouble);
  }
  return state;
}

TensorMap DiLoCoX::state() {
  try {
    for (Scheduled& s : fragments_)
      s.fragment.settle();
  } catch (...) {
    giveUp();
    throw;
  }
  TensorMap state = counters();
  for (const Scheduled& s : fragments_)
    state.merge(s.fragment.state());
  return state;
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
        number("mode") < 0 || number("mode") > 3 ? "another" : outerModeName(static_cast<OuterMode>(number("mode")))));
  }
  for (const auto& [key, expected] : {std::pair("fragments", options_.fragments), std::pair("delay", options_.delay)}) {
    if (number(key) != expected)
      throw ValueError(c10::str("DiLoCoX: load: ", key, ": expected ", expected, ", got ", number(key)));
  }
  if (group_ && number("ranks") != group_->size()) {
    throw ValueError(c10::str("DiLoCoX: load: expected the state of a group of ", group_->size(), " ranks, got one of ",
                              number("ranks")));
  }
  for (const Scheduled& s : fragments_)
    s.fragment.check(state);
  for (Scheduled& s : fragments_)
    s.fragment.drop();
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const std::string name = "fragment" + std::to_string(f);
    const at::Tensor kept = state.at(name).contiguous();
    const int64_t* at = kept.const_data_ptr<int64_t>();
    Scheduled& s = fragments_[f];
    s.fragment.load(state, at[3] == 0 ? Fragment::Phase::idle : Fragment::Phase::landed,
                    state.at(name + ".effective_rank").item<double>());
    s.send_at = at[0];
    s.apply_at = at[1];
    s.sent = at[2];
  }
  const at::Tensor effective = state.at("effective_ranks").contiguous();
  adaptation_.set({effective.const_data_ptr<double>(), effective.const_data_ptr<double>() + effective.numel()});
  steps_ = number("steps");
  applied_ = number("applied");
  // What does not adapt is what the options say now.
  sync_every_ = options_.adapt_sync_every ? std::min(number("sync_every"), options_.sync_every) : options_.sync_every;
  rank_ = options_.adapt_rank || options_.adapt_sync_every ? state.at("rank").item<double>()
                                                           : static_cast<double>(options_.rank);
  report_.outer_steps = number("outer_steps");
  if (options_.adapt_rank) {
    for (size_t f = 0; f < of_parameters_; ++f)
      fragments_[f].fragment.setRank(std::llround(rank_));
  }
}

}  // namespace lowcomm

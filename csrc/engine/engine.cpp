#include "engine/engine.h"

#include <algorithm>
#include <future>

#include "base/error.h"
#include "base/signals.h"
#include "collective/exchange.h"

namespace lowcomm {
namespace {

constexpr std::chrono::milliseconds kNoticePatience{500}, kNoLimit{0};

}  // namespace

Engine::Engine(std::unique_ptr<Transport> transport, GroupConfig config)
    : transport_(std::move(transport)),
      group_(*transport_, config),
      record_(group_, config.flight_record, config.flight_folder),
      notices_(group_),
      messages_(group_),
      ops_(group_, record_) {
  notices_.watch();
  if (group_.size() > 1) {
    op_notices_ = std::make_unique<OpNotices>(
        group_, [this](int peer, const OpNotice& notice) { cancelOp(notice, peer); },
        [this](int peer, const std::string& why) {
          fault("lowcomm: " + group_.rankName(peer) + ": " + why, ops_.lastSequence());
        });
    op_notices_->start();
  }
  worker_ = std::thread([this] { loop(); });
}

Engine::~Engine() {
  shutdown();
}

uint32_t Engine::submit(std::string op, Job job, Done done, std::optional<uint32_t> given) {
  GroupOps::Entry entry{std::move(op), 0, std::move(job), std::move(done)};
  const auto refused = ops_.add(entry, given);
  // This rank will not answer any more, and its notice went out when the group ended: a peer that waits for it in an
  // agreement is to see the connection close, not the deadline pass.
  if (refused && refused->is_over) transport_->cancel(Lane::control);
  if (refused) entry.done(refused->error, OpCounters{});
  return entry.sequence;
}

std::exception_ptr Engine::runInline(OpContext& op, const std::function<void()>& part) {
  if (const auto refused = ops_.enter(op.op)) return refused;
  if (!op.progress) op.progress = record_.add(op.op, op.sequence);
  std::exception_ptr error = attempt(op, part);
  ops_.leave();
  return error;
}

// On a thread of its own where handlers of signals run on the caller's, which only looks at the time meanwhile.
std::exception_ptr Engine::waitInline(OpContext& op, const std::function<void()>& part) {
  if (!handlesSignals()) return runInline(op, part);
  auto running = std::async(std::launch::async, [&] { return runInline(op, part); });
  waitWithSignals(
      kNoLimit,
      [&](std::chrono::milliseconds patience) { return running.wait_for(patience) == std::future_status::ready; },
      [&](const std::string& name) { interrupt(op.op, name); });
  return running.get();
}

void Engine::drain() {
  waitWithSignals(
      kNoLimit, [this](std::chrono::milliseconds patience) { return drainFor(patience); },
      [this](const std::string& name) { interrupt("the ops before", name); });
}

bool Engine::drainFor(std::chrono::milliseconds patience) {
  return ops_.waitUntilIdle(patience);
}

std::string Engine::endedWhy() {
  return ops_.endedWhy();
}

void Engine::abort(const std::string& why) {
  if (!ops_.end(why)) return;
  notices_.send(why, ops_.lastSequence());
  // Before what is under way is broken off: what it waits for is what a reader wants to know.
  ops_.explainEnd(why + record_.write(why));
  cancelWaits();
}

void Engine::breakOff(const std::string& why) {
  ops_.end(why);
  cancelWaits();
}

void Engine::cancelWaits() {
  transport_->cancel(Lane::bulk);
  transport_->cancel(Lane::control);
  messages_.breakWaits();
  ops_.wake();
}

void Engine::interrupt(const std::string& op, const std::string& name) {
  abort(group_.rankName(group_.rank()) + " gave the group up: " + name + " in its wait for " + op);
}

void Engine::shutdown() {
  ops_.stop();
  std::lock_guard<std::mutex> joining(joining_);
  if (worker_.joinable()) worker_.join();
  if (endedWhy().empty()) messages_.settle(kNoticePatience);
  cancelWaits();
  ops_.waitUntilLeft();
  if (op_notices_) op_notices_->stop();
  messages_.stop();
}

void Engine::loop() {
  for (;;) {
    ops_.waitForOp();
    // An op begins when all peers can know of the earlier ops that were cancelled (OpContext::wait), or when the
    // progress deadline for that is over. A leaving rank waits briefly, and not at all once the group is over.
    if (op_notices_) {
      op_notices_->settle([&](std::chrono::milliseconds waited) {
        const std::chrono::milliseconds most(ops_.isStopping() ? kNoticePatience.count() : group_.timeout_ms.load());
        return waited > most || !endedWhy().empty();
      });
    }
    GroupOps::Entry entry;
    const GroupOps::Next next = ops_.take(entry);
    if (next == GroupOps::Next::stop) return;
    if (next == GroupOps::Next::none) continue;
    runOp(entry);
    entry = {};  // what the closures hold goes before a thread that drains goes on
    group_.frames.trim();
    ops_.finished();
  }
}

void Engine::runOp(GroupOps::Entry& entry) {
  OpContext op(group_, entry.op, entry.sequence);
  op.progress = entry.progress;
  op.cancellation = entry.cancellation;
  op.is_numbered_alike = true;
  const std::exception_ptr error = attempt(op, [&] {
    op.note([](OpProgress::State& state) { state.start(); });
    entry.job(op);
    transport_->acknowledge();
    op.note([&](OpProgress::State& state) {
      state.sent_bytes = op.counters.wire_bytes;
      state.received_bytes = op.counters.received_bytes;
      state.end("");
    });
  });
  ops_.ran();
  entry.done(error, op.counters);
}

std::exception_ptr Engine::attempt(OpContext& op, const std::function<void()>& job) {
  const std::exception_ptr error = tried(op, job);
  if (error) op.noteFailure(whatOf(error));
  return error;
}

std::exception_ptr Engine::tried(OpContext& op, const std::function<void()>& job) {
  if (!endedWhy().empty()) return ops_.ended(op.op);
  if (const auto cause = op.cancellation ? op.cancellation->given() : std::nullopt) return op.givenUp(*cause);
  // This rank leaves the conversation in the middle: whatever its reason, the peers are left with half an op.
  const auto abandon = [&](const std::exception& why) {
    return lose(op,
                PeerError("lowcomm: " + op.op + " failed on " + group_.rankName(group_.rank()) + ": " + why.what()));
  };
  try {
    job();
    return nullptr;
  } catch (const PeerRefusal&) {
    return std::current_exception();
  } catch (const ValueError& mistake) {
    return op.conversing ? abandon(mistake) : std::current_exception();
  } catch (const TypeError& mistake) {
    return op.conversing ? abandon(mistake) : std::current_exception();
  } catch (const PeerError& lost) {
    return lose(op, lost);
  } catch (const std::exception& other) {  // out of memory, say: the conversation is broken off all the same
    return op.whole ? std::current_exception() : abandon(other);
  }
}

// A fault: the first cause is kept, the peers are told, and theirs is asked for where it explains ours.
std::exception_ptr Engine::lose(OpContext& op, const PeerError& lost) {
  std::string message = lost.what();
  if (!end(message)) return std::make_exception_ptr(PeerError(message, lost.peer));
  const auto* transfer = dynamic_cast<const TransferError*>(&lost);
  // A peer that closed has said why before it did: ours passes it on. One that is slow may be waiting for a third, and
  // gives up about when we do: it is asked after it was told. One that sent what it must not has nothing to add.
  const auto ask = [&](TransportError::Kind kind) {
    if (!transfer || transfer->kind != kind) return;
    const std::string said =
        lost.peer < 0 ? notices_.first(kNoticePatience) : notices_.read(lost.peer, kNoticePatience);
    if (!said.empty()) message += "; " + said;
  };
  ask(TransportError::Kind::closed);
  tell(message, op.sequence);
  ask(TransportError::Kind::timed_out);
  op.noteFailure(message);
  breakBulk(message);
  return std::make_exception_ptr(PeerError(message, lost.peer));
}

// The inner backend does not say which peer failed it, and closes its connections before anybody could say why: all are
// listened to, once they have been told.
std::string Engine::fault(const std::string& why, uint32_t sequence, const std::shared_ptr<OpProgress>& progress) {
  std::string message = why;
  if (end(message)) {
    tell(message, sequence);
    const std::string said = notices_.first(kNoticePatience);
    if (!said.empty()) message += "; " + said;
    if (progress) progress->update([&](OpProgress::State& state) { state.end(message); });
    breakBulk(message);
  }
  return message.substr(why.size());
}

// Whether this is the first cause of the group's end. It is kept; else `message` gets the one there was.
bool Engine::end(std::string& message) {
  if (ops_.end(message)) return true;
  message += "; the group was ended: " + endedWhy();
  return false;
}

void Engine::tell(const std::string& message, uint32_t sequence) {
  notices_.send(group_.rankName(group_.rank()) + " gave the group up: " + message, sequence);
}

// The cause, as far as it is known by now, and where the flight record is, are what later ops are told.
void Engine::breakBulk(std::string& message) {
  message += record_.write(message);
  transport_->cancel(Lane::bulk);
  messages_.breakWaits();
  ops_.explainEnd(message);
}

bool Engine::cancel(uint32_t sequence, const std::string& why) {
  return cancelling(
      why, [&](const std::string& reason) { return cancelOp({sequence, {group_.rank(), reason}}, std::nullopt); });
}

bool Engine::cancel(const std::shared_ptr<P2pMessage>& message, const std::string& why) {
  return cancelling(why, [&](const std::string& reason) { return messages_.cancel(message, reason); });
}

bool Engine::cancel(const std::shared_ptr<AnyRecv>& recv, const std::string& why) {
  return cancelling(why, [&](const std::string& reason) { return messages_.cancelAny(recv, reason); });
}

bool Engine::cancelling(const std::string& why, const std::function<bool(const std::string&)>& part) {
  if (!ops_.enterCancel()) return false;
  struct Leave {
    GroupOps& ops;
    ~Leave() { ops.leaveCancel(); }
  } leave{ops_};
  return part(beginningOf(why, kMaxErrorText));
}

// Cancels an op once; returns whether this was the time. `from`: the peer whose notice it is.
bool Engine::cancelOp(const OpNotice& notice, std::optional<int> from) {
  const auto cancelled = ops_.cancel(notice, from);
  if (!cancelled) return false;
  if (op_notices_) op_notices_->tell(notice);
  closeTags(notice.sequence);
  if (cancelled->cancellation) cancelled->cancellation->closed();
  if (const auto& queued = cancelled->queued) {
    OpContext op(group_, queued->op, queued->sequence);
    op.progress = queued->progress;
    const std::exception_ptr error = op.givenUp(notice.cause);
    op.noteFailure(whatOf(error));
    queued->done(error, op.counters);
  }
  return true;
}

void Engine::closeTags(uint32_t sequence) {
  const uint32_t first = OpContext::firstTag(sequence);
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    for (const uint32_t tag : {kAgreementTag, kCountsTag})
      transport_->closeTag(Lane::control, peer, first + tag);
    group_.closeTags(peer, first);
  }
}

}  // namespace lowcomm

#include "engine/engine.h"

#include <algorithm>
#include <future>

#include "base/error.h"
#include "base/process.h"
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
  worker_ = std::thread([this] { loop(); });
}

Engine::~Engine() {
  shutdown();
}

uint32_t Engine::submit(std::string op, Job job, Done done, std::optional<uint32_t> given) {
  GroupOps::Entry entry{std::move(op), 0, std::move(job), std::move(done)};
  const std::exception_ptr refused = ops_.add(entry, given);
  // This rank will not answer any more, and its notice went out when the group ended: a peer that waits for it in an
  // agreement is to see the connection close, not the deadline pass.
  if (refused) {
    transport_->cancel(Lane::control);
    entry.done(refused, OpCounters{});
  }
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
}

void Engine::interrupt(const std::string& op, const std::string& name) {
  abort(group_.rankName(group_.rank()) + " gave the group up: " + name + " in its wait for " + op);
}

void Engine::shutdown() {
  ops_.stop();
  std::lock_guard<std::mutex> joining(joining_);
  if (worker_.joinable()) worker_.join();
  if (endedWhy().empty()) awaitArrivals();
  cancelWaits();
  ops_.waitUntilLeft();
  messages_.stop();
}

bool Engine::awaitArrivals(std::chrono::milliseconds patience) {
  patience = std::min(patience, std::chrono::milliseconds(group_.timeout_ms.load()));
  std::string peers;
  for (const int peer : group_.leaving.flush(patience))
    peers += (peers.empty() ? "" : ", ") + group_.rankName(peer);
  if (peers.empty()) return true;
  logLine("group " + group_.name + " ends on " + group_.rankName(group_.rank()) + ", and the last frames to " + peers +
          " have not arrived within " + std::to_string(patience.count()) + " ms");
  return false;
}

void Engine::loop() {
  for (GroupOps::Entry entry; ops_.take(entry);) {
    runOp(entry);
    entry = {};  // what the closures hold goes before a thread that drains goes on
    group_.frames.trim();
    ops_.finished();
  }
}

void Engine::runOp(GroupOps::Entry& entry) {
  OpContext op(group_, entry.op, entry.sequence);
  op.progress = entry.progress;
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
  entry.done(error, op.counters);
}

std::exception_ptr Engine::attempt(OpContext& op, const std::function<void()>& job) {
  const std::exception_ptr error = tried(op, job);
  if (error) op.noteFailure(whatOf(error));
  return error;
}

std::exception_ptr Engine::tried(OpContext& op, const std::function<void()>& job) {
  if (!endedWhy().empty()) return ops_.ended(op.op);
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

}  // namespace lowcomm

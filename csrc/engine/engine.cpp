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
      messages_(group_) {
  notices_.watch();
  if (transport_->canCloseTags() && group_.size() > 1) {
    words_ = std::make_unique<OpNotices>(
        group_, [this](int peer, const OpNotice& word) { giveUp(word, peer); },
        [this](int peer, const std::string& why) {
          std::unique_lock<std::mutex> lock(mutex_);
          const uint32_t sequence = sequence_;
          lock.unlock();
          fault("lowcomm: " + group_.rankName(peer) + ": " + why, sequence);
        });
    words_->start();
  }
  worker_ = std::thread([this] { loop(); });
}

Engine::~Engine() {
  shutdown();
}

uint32_t Engine::submit(std::string op, Job job, Done done, std::optional<uint32_t> given) {
  std::exception_ptr refused;
  bool is_over = false;
  uint32_t sequence;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    sequence = sequence_ = given.value_or(sequence_ + 1);
    const auto cause = takeGivenUp(sequence);
    is_over = !ended_why_.empty() || stopping_;
    if (is_over) {
      refused = ended(op);
    } else {
      auto progress = record_.add(op, sequence);
      if (cause) {
        OpContext context(group_, op, sequence);
        context.progress = progress;
        refused = context.givenUp(*cause);
        context.noteFailure(whatOf(refused));
      } else {
        auto cancellation = transport_->canCloseTags() ? std::make_shared<Cancellation>() : nullptr;
        queue_.push_back(
            {std::move(op), sequence, std::move(job), std::move(done), std::move(progress), std::move(cancellation)});
      }
    }
  }
  if (is_over) {
    // This rank will not answer any more, and its notice went out when the group ended: a peer that waits for it in an
    // agreement is to see the connection close, not the deadline pass.
    transport_->cancel(Lane::control);
  }
  refused ? done(refused, OpCounters{}) : changed_.notify_all();
  return sequence;
}

std::exception_ptr Engine::runInline(OpContext& op, const std::function<void()>& part) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return ended(op.op);
    ++running_inline_;
  }
  if (!op.progress) op.progress = record_.add(op.op, op.sequence);
  std::exception_ptr error = attempt(op, part);
  {
    // Notified under the lock: the thread that shuts the group down may destroy it as soon as the count is 0.
    std::lock_guard<std::mutex> lock(mutex_);
    --running_inline_;
    changed_.notify_all();
  }
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
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return queue_.empty() && !busy_ && giving_up_ == 0; });
}

std::string Engine::endedWhy() {
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_why_;
}

void Engine::abort(const std::string& why) {
  uint32_t sequence;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_why_.empty()) return;
    ended_why_ = why;
    if (current_) current_->endGroup();
    sequence = sequence_;
  }
  notices_.send(why, sequence);
  // Before what is under way is broken off: what it waits for is what a reader wants to know.
  const std::string written = record_.write(why);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_why_ = why + written;
  }
  cancelWaits();
}

void Engine::breakOff(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_why_.empty()) ended_why_ = why;
    if (current_) current_->endGroup();
  }
  cancelWaits();
}

void Engine::cancelWaits() {
  transport_->cancel(Lane::bulk);
  transport_->cancel(Lane::control);
  messages_.breakWaits();
  changed_.notify_all();
}

void Engine::interrupt(const std::string& op, const std::string& name) {
  abort(group_.rankName(group_.rank()) + " gave the group up: " + name + " in its wait for " + op);
}

void Engine::shutdown() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  std::lock_guard<std::mutex> joining(joining_);
  if (worker_.joinable()) worker_.join();
  if (endedWhy().empty()) messages_.settle(kNoticePatience);
  cancelWaits();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return running_inline_ == 0 && giving_up_ == 0; });
  }
  if (words_) words_->stop();
  messages_.stop();
}

void Engine::loop() {
  for (;;) {
    Entry entry;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    }
    // An op begins when all peers can know of the earlier ops that were cancelled (OpContext::wait), or when the
    // progress deadline for that is over. A leaving rank waits briefly, and not at all once the group is over.
    if (words_)
      words_->settle([&](std::chrono::milliseconds waited) {
        std::lock_guard<std::mutex> lock(mutex_);
        const std::chrono::milliseconds most(stopping_ ? kNoticePatience.count() : group_.timeout_ms.load());
        return !ended_why_.empty() || waited > most;
      });
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (queue_.empty()) {
        if (stopping_) return;
        continue;
      }
      entry = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      current_ = entry.cancellation;
      current_sequence_ = entry.sequence;
    }
    {
      OpContext op(group_, entry.op, entry.sequence);
      op.progress = entry.progress;
      op.cancellation = entry.cancellation;
      op.is_numbered_alike = true;
      std::exception_ptr error = attempt(op, [&] {
        op.note([](OpProgress::State& state) { state.start(); });
        entry.job(op);
        transport_->acknowledge();
        op.note([&](OpProgress::State& state) {
          state.sent_bytes = op.counters.wire_bytes;
          state.received_bytes = op.counters.received_bytes;
          state.end("");
        });
      });
      {
        std::lock_guard<std::mutex> lock(mutex_);
        current_ = nullptr;
      }
      entry.done(error, op.counters);
    }
    entry = Entry{};  // what the closures hold goes before anybody who drains goes on
    group_.frames.trim();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
    }
    changed_.notify_all();
  }
}

std::exception_ptr Engine::attempt(OpContext& op, const std::function<void()>& job) {
  const std::exception_ptr error = tried(op, job);
  if (error) op.noteFailure(whatOf(error));
  return error;
}

std::exception_ptr Engine::tried(OpContext& op, const std::function<void()>& job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_why_.empty()) return ended(op.op);
  }
  if (const auto cause = op.cancellation ? op.cancellation->given() : std::nullopt) return op.givenUp(*cause);
  try {
    job();
    return nullptr;
  } catch (const PeerRefusal&) {
    return std::current_exception();
  } catch (const ValueError& mistake) {
    return op.conversing ? abandon(op, mistake) : std::current_exception();
  } catch (const TypeError& mistake) {
    return op.conversing ? abandon(op, mistake) : std::current_exception();
  } catch (const PeerError& lost) {
    return lose(op, lost);
  } catch (const std::exception& other) {  // out of memory, say: the conversation is broken off all the same
    return op.whole ? std::current_exception() : abandon(op, other);
  }
}

// This rank leaves the conversation in the middle: whatever its reason, the peers are left with half an op.
std::exception_ptr Engine::abandon(OpContext& op, const std::exception& why) {
  return lose(op, PeerError("lowcomm: " + op.op + " failed on " + group_.rankName(group_.rank()) + ": " + why.what()));
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
  settle(message);
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
    settle(message);
  }
  return message.substr(why.size());
}

// Whether this is the first cause of the group's end. It is kept; else `message` gets the one there was.
bool Engine::end(std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ended_why_.empty()) {
    ended_why_ = message;
    if (current_) current_->endGroup();
    return true;
  }
  message += "; the group was ended: " + ended_why_;
  return false;
}

void Engine::tell(const std::string& message, uint32_t sequence) {
  notices_.send(group_.rankName(group_.rank()) + " gave the group up: " + message, sequence);
}

// The cause, as far as it is known by now, and where the flight record is, are what later ops are told.
void Engine::settle(std::string& message) {
  message += record_.write(message);
  transport_->cancel(Lane::bulk);
  messages_.breakWaits();
  std::lock_guard<std::mutex> lock(mutex_);
  ended_why_ = message;
}

std::exception_ptr Engine::ended(const std::string& op) const {
  const std::string why = ended_why_.empty() ? "it was shut down" : ended_why_;
  return std::make_exception_ptr(PeerError("lowcomm: " + op + " on group " + group_.name +
                                           " of a lost group; destroy it and make a new one. First cause: " + why));
}

}  // namespace lowcomm

// Ops and messages that are given up (Engine::cancel says how).
#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/engine.h"

namespace lowcomm {

bool Engine::cancel(uint32_t sequence, const std::string& why) {
  return givingUp(why,
                  [&](const std::string& reason) { return giveUp({sequence, {group_.rank(), reason}}, std::nullopt); });
}

bool Engine::cancel(const std::shared_ptr<P2pMessage>& message, const std::string& why) {
  return givingUp(why, [&](const std::string& reason) { return messages_.cancel(message, reason); });
}

bool Engine::cancel(const std::shared_ptr<AnyRecv>& recv, const std::string& why) {
  return givingUp(why, [&](const std::string& reason) { return messages_.cancelAny(recv, reason); });
}

bool Engine::givingUp(const std::string& why, const std::function<bool(const std::string&)>& part) {
  if (!transport_->canCloseTags()) {
    throw ValueError("cancel: expected a transport that can give one op up (transport=\"tcp\"), got group " +
                     group_.name + "'s, which can only end the group");
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_why_.empty()) return false;
    ++giving_up_;
  }
  struct Leave {
    Engine& engine;
    ~Leave() {
      std::lock_guard<std::mutex> lock(engine.mutex_);
      --engine.giving_up_;
      engine.changed_.notify_all();
    }
  } leave{*this};
  return part(beginningOf(why, kMaxErrorText));
}

// Once an op; whether this was the time. `heard_from`: the peer whose word it is.
bool Engine::giveUp(const OpNotice& word, std::optional<int> heard_from) {
  std::optional<Entry> out;
  std::shared_ptr<Cancellation> cancellation;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_why_.empty()) return false;
    const auto known = given_up_.find(word.sequence);
    if (known != given_up_.end()) {
      if (heard_from) --known->second.words;
      forgetGivenUp();
      return false;
    }
    const auto queued =
        std::find_if(queue_.begin(), queue_.end(), [&](const Entry& entry) { return entry.sequence == word.sequence; });
    if (queued != queue_.end()) cancellation = queued->cancellation;
    if (current_ && current_sequence_ == word.sequence) cancellation = current_;
    const bool is_given_up = cancellation && cancellation->given();
    if (!heard_from && (!cancellation || is_given_up)) return false;
    given_up_[word.sequence] = {word.cause, group_.size() - 1 - (heard_from ? 1 : 0)};
    forgetGivenUp();
    if (cancellation) cancellation->give(word.cause);
    if (queued != queue_.end() && !heard_from) {
      out = std::move(*queued);
      queue_.erase(queued);
    }
  }
  if (words_) words_->tell(word);
  closeTags(word.sequence);
  if (cancellation) cancellation->closed();
  if (out) {
    OpContext op(group_, out->op, out->sequence);
    op.progress = out->progress;
    const std::exception_ptr error = op.givenUp(word.cause);
    op.noteFailure(whatOf(error));
    out->done(error, op.counters);
  }
  return true;
}

// With the lock: of an op that is submitted now.
std::optional<Cancellation::Cause> Engine::takeGivenUp(uint32_t sequence) {
  const auto known = given_up_.find(sequence);
  if (known == given_up_.end()) return {};
  const Cancellation::Cause cause = known->second.cause;
  forgetGivenUp();
  return cause;
}

// With the lock.
void Engine::forgetGivenUp() {
  std::erase_if(given_up_, [&](const auto& op) {
    const bool past = static_cast<int32_t>(op.first - sequence_) <= 0;
    return past && op.second.words == 0;
  });
}

void Engine::closeTags(uint32_t sequence) {
  const uint32_t first = OpContext::firstTag(group_, sequence);
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    for (const uint32_t tag : {kAgreementTag, kCountsTag})
      transport_->closeTag(Lane::control, peer, first + tag);
    group_.closeTags(peer, first);
  }
}

}  // namespace lowcomm

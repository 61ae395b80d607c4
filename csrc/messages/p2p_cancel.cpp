// Messages that are cancelled (P2p::cancel says how).
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "messages/p2p_parts.h"
#include "transport/transport.h"

namespace lowcomm {

bool P2p::Cancels::cancel(const std::shared_ptr<P2pMessage>& message, const std::string& why) {
  bool has_tags;  // else the peer is told when it is paired
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    const bool is_through = message->through_ || (!message->finishing_ && message->isThrough());
    if (is_through || message->cancelled_) return false;
    message->cancelled_ = true;
    has_tags = message->first_tag_.has_value();
    message->op.cancellation->give({p2p_.group_.rank(), why});
  }
  leave(*message, /*closes=*/has_tags, /*tells=*/has_tags);
  return true;
}

void P2p::Cancels::note(P2pMessage& message, const Announcement& announcement) {
  message.cancelled_ = true;
  if (announcement.cancelled) message.op.cancellation->give(*announcement.cancelled);
}

// If the receiver cancelled it, its tags are closed here.
void P2p::Cancels::pair(const std::shared_ptr<P2pSend>& message, const Announcement& announcement) {
  leave(*message, /*closes=*/!announcement.cancelled, /*tells=*/true);
  if (announcement.cancelled) forget(*message);
}

// The peer's message about one that either rank cancels: an answer, or this rank answers, now or when it has posted
// its own.
void P2p::Cancels::received(int peer, const CancelMessage& notice) {
  if (!MessageTags::belongs(notice.first_tag, p2p_.group_.rank(), peer) &&
      !MessageTags::belongs(notice.first_tag, peer, p2p_.group_.rank()))
    throw WireError("message given up: expected the first tag of one, got " + std::to_string(notice.first_tag));
  if (notice.cause.by < 0 || notice.cause.by >= p2p_.group_.size()) {
    throw WireError("message given up: by: expected a rank below " + std::to_string(p2p_.group_.size()) + ", got " +
                    std::to_string(notice.cause.by));
  }
  std::shared_ptr<P2pMessage> message;
  bool is_answer = false, answers_later = false;
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    message = p2p_.underWay(peer, notice.first_tag);
    if (message) {
      is_answer = std::exchange(message->cancelled_, true);
      message->op.cancellation->give(notice.cause);
    } else if (Announcement* const waiting = announced(peer, notice.first_tag)) {
      waiting->cancelled = notice.cause;
      answers_later = true;
    }
  }
  if (!message) {
    p2p_.group_.closeTags(peer, notice.first_tag);
    if (!answers_later) tell(peer, {notice.first_tag, 0, notice.cause});  // it is through here
    return;
  }
  if (!is_answer) leave(*message, /*closes=*/true, /*tells=*/true);
  if (auto* const received = dynamic_cast<P2pRecv*>(message.get()); received && notice.number > 0)
    p2p_.adopt(*received, notice.number);
  forget(*message);
}

// With the lock: an announcement that no message has been paired with; null: none.
Announcement* P2p::Cancels::announced(int peer, uint32_t first_tag) {
  for (auto& [key, flow] : p2p_.flows_) {
    if (std::get<0>(key) != peer) continue;
    for (Announcement& announcement : flow.announced)
      if (announcement.first_tag == first_tag) return &announcement;
  }
  return nullptr;
}

// Cancels a message: its waits end, its transfers stop, and the peer is notified before the memory is released. The
// thread that finishes it releases its frames.
void P2p::Cancels::leave(P2pMessage& message, bool closes, bool tells) {
  message.leave();
  if (closes) p2p_.group_.closeTags(message.peer, *message.first_tag_);
  message.op.cancellation->closed();
  if (tells) tell(message);
  auto* const received = dynamic_cast<P2pRecv*>(&message);
  std::optional<FrameHeader> first;
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    if (message.finishing_) return;
    if (received && received->hasFirst()) first = received->firstHeader();
    message.release();
  }
  const Cancellation::Cause cause = *message.op.cancellation->given();
  message.op.note(
      [&](OpProgress::State& state) { state.end(p2p_.group_.rankName(cause.by) + " gave it up: " + cause.why); });
  p2p_.group_.frames.trim();
  if (first && first->epoch == p2p_.group_.epoch) p2p_.adopt(*received, first->sequence);
}

void P2p::Cancels::tell(const P2pMessage& message) {
  tell(message.peer, {*message.first_tag_, message.sends ? message.op.sequence : 0, *message.op.cancellation->given()});
}

void P2p::Cancels::tell(int peer, const CancelMessage& notice) {
  std::lock_guard<std::mutex> telling(telling_);
  std::erase_if(told_, [](const AnnouncementBoard::Delivery& told) { return isOver(*told.transfer); });
  try {
    told_.push_back(p2p_.board_.tell(peer, notice));
  } catch (const TransportError&) {
    // The thread that listens to the peer finds the same error.
  }
}

void P2p::Cancels::settle(std::chrono::milliseconds patience) {
  const auto end = OpContext::Clock::now() + patience;
  std::lock_guard<std::mutex> telling(telling_);
  for (const AnnouncementBoard::Delivery& told : told_) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - OpContext::Clock::now());
    isOver(*told.transfer, std::max(left, std::chrono::milliseconds(0)));
  }
}

// Both ranks know of it.
void P2p::Cancels::forget(P2pMessage& message) {
  std::shared_ptr<P2pMessage> dropped;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(p2p_.mutex_);
  const auto flow = p2p_.flows_.find(keyOf(message));
  auto& under_way = flow->second.under_way;
  const auto at = std::find_if(under_way.begin(), under_way.end(), [&](const auto& m) { return m.get() == &message; });
  dropped = std::move(*at);
  under_way.erase(at);
  p2p_.close(flow->first, flow->second);
}

}  // namespace lowcomm

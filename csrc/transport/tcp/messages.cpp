#include "transport/tcp/messages.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace lowcomm::tcp {

using Kind = TransportError::Kind;

namespace {

constexpr size_t kMostClosedTags = 1 << 20;  // by a peer, that this rank has yet to close

void expectFits(const Record& record, size_t room) {
  if (record.bytes <= room) return;
  throw WireError("message with tag " + std::to_string(record.tag) + ": expected at most " + std::to_string(room) +
                  " bytes, got " + std::to_string(record.bytes));
}

}  // namespace

void Delivery::complete(size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    bytes_ = bytes;
    done_ = true;
    changed_.notify_all();
  }
  end();
}

void Delivery::fail(Kind kind, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (done_ || failed_) return;
    failed_ = true;
    kind_ = kind;
    why_ = why;
    changed_.notify_all();
  }
  end();
}

void Delivery::end() {
  if (const auto then = std::exchange(then_, nullptr)) then();
}

bool Delivery::ended() {
  std::lock_guard lock(mutex_);
  return done_ || failed_;
}

size_t Delivery::wait(int peer, std::chrono::milliseconds deadline) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, deadline, [&] { return done_ || failed_; })) {
    throw TransportError(Kind::timed_out, peer,
                         "Timed out waiting " + std::to_string(deadline.count()) + "ms for the message");
  }
  if (failed_) throw TransportError(kind_, peer, why_);
  return bytes_;
}

std::shared_ptr<Delivery> Sends::send(uint32_t tag, std::span<const std::byte> data, uint64_t place,
                                      std::function<void()> then) {
  const uint64_t cost = earlyCost(data.size()), most_offered = most_early_ / kMessageCost;
  const bool is_unasked = unasked_ + cost <= most_early_;
  if (!is_unasked && offered_ == most_offered) {
    throw ValueError("tcp transport: expected at most " + std::to_string(most_offered) +
                     " messages to a peer that it has no receives for yet, got one more");
  }
  auto delivery = std::make_shared<Delivery>(std::move(then));
  (is_unasked ? unasked_ : offered_) += is_unasked ? cost : 1;
  if (is_unasked) {
    out_.append({Record::Kind::message, tag, sent_, data.size()}, data, place);
  } else {
    out_.append({Record::Kind::offered, tag, sent_, data.size()}, {}, place);
  }
  undelivered_[sent_++] = {delivery, data, place, out_.end(), tag, !is_unasked, is_unasked};
  return delivery;
}

Sends::Undelivered& Sends::undelivered(uint64_t number, const char* record) {
  const auto found = undelivered_.find(number);
  if (found != undelivered_.end()) return found->second;
  throw WireError(std::string("message ") + record + ": expected one under way, got number " + std::to_string(number));
}

void Sends::wanted(uint64_t number) {
  Undelivered& message = undelivered(number, "wanted");
  if (message.given_up) return;  // and the peer is about to receive the record of that
  if (!std::exchange(message.is_offered, false))
    throw WireError("message wanted: expected one that was offered, got number " + std::to_string(number));
  --offered_;
  out_.append({Record::Kind::body, 0, number, message.data.size()}, message.data, message.place);
  message.end = out_.end();
}

void Sends::delivered(uint64_t number, bool dropped) {
  Undelivered& message = undelivered(number, dropped ? "dropped" : "delivered");
  // Its sender would have its bytes again while they leave.
  const bool leaves = message.end > out_.begin() && out_.has(number);
  if (leaves || (message.is_offered && !message.given_up && !dropped))
    throw WireError("message delivered: expected one that was sent, got number " + std::to_string(number));
  if (message.is_unasked) unasked_ -= earlyCost(message.data.size());
  if (message.is_offered) --offered_;
  dropped ? message.delivery->fail(Kind::cancelled, kCancelledByPeer) : message.delivery->complete(message.data.size());
  undelivered_.erase(number);
}

void Sends::closeTag(uint32_t tag) {
  std::vector<uint64_t> numbers;
  for (const auto& [number, message] : undelivered_) {
    if (message.tag == tag && !message.given_up) numbers.push_back(number);
  }
  if (numbers.empty()) return;
  std::sort(numbers.begin(), numbers.end());
  for (const uint64_t number : numbers) {
    undelivered_[number].given_up = true;
    out_.append({Record::Kind::given_up, 0, number, 0}, {}, /*place=*/0);
  }
  out_.giveUp(numbers);
  for (const uint64_t number : numbers)
    undelivered_[number].delivery->fail(Kind::cancelled, kCancelledHere);  // now the caller may free its bytes
}

void Sends::fail(Kind kind, const std::string& why) {
  for (auto& [number, message] : undelivered_)
    message.delivery->fail(kind, why);
  undelivered_.clear();
}

// ---- receives ----

std::shared_ptr<Delivery> Receives::receive(uint32_t tag, std::span<std::byte> room, std::function<void()> then) {
  auto delivery = std::make_shared<Delivery>(std::move(then));
  const auto early = early_.find(tag);
  if (early == early_.end()) {
    posted_[tag].push_back({room, delivery});
    return delivery;
  }
  const std::shared_ptr<Incoming> message = std::move(early->second.front());
  early->second.pop_front();
  if (early->second.empty()) early_.erase(early);
  if (message->given_up) return delivery->fail(Kind::cancelled, kCancelledByPeer), delivery;
  if (message->offered()) uncount(*message);
  expectFits(message->record, room.size());
  message->room = room;
  message->delivery = delivery;
  delivery->came_early = true;
  if (message->offered()) {
    want(*message);
  } else if (message->have == message->record.bytes) {
    finish(*message);
  }
  return delivery;
}

std::optional<uint32_t> Receives::unclaimed(uint32_t first) const {
  const auto comes = [](const auto& message) { return !message->given_up; };
  const auto found = std::find_if(early_.lower_bound(first), early_.end(), [&](const auto& of_tag) {
    return std::any_of(of_tag.second.begin(), of_tag.second.end(), comes);
  });
  return found == early_.end() ? std::nullopt : std::optional(found->first);
}

void Receives::begin(const Record& record) {
  if (record.number != come_) {
    throw WireError("number of a message: expected " + std::to_string(come_) + ", got " +
                    std::to_string(record.number));
  }
  ++come_;
  auto message = std::make_shared<Incoming>();
  message->record = record;
  coming_.emplace(record.number, message);
  match(message);
  if (!message->delivery && !message->given_up) count(*message);
  if (message->offered()) {
    if (message->given_up) return drop(record.number);
    if (message->delivery) want(*message);
    return;
  }
  if (message->delivery) {
    message->to = message->room.first(record.bytes);
  } else if (!message->given_up) {
    message->own.resize(record.bytes);
    message->to = message->own;
  }
  coming_now_ = std::move(message);
  if (record.bytes == 0) arrived(0);
}

void Receives::beginBody(const Record& record) {
  const auto message = coming_.find(record.number);
  if (message == coming_.end() || !std::exchange(message->second->is_wanted, false))
    throw WireError("body: expected that of a message that is wanted, got number " + std::to_string(record.number));
  coming_now_ = message->second;
  if (coming_now_->record.bytes != record.bytes) {
    throw WireError("body of message " + std::to_string(record.number) + ": expected " +
                    std::to_string(coming_now_->record.bytes) + " bytes, got " + std::to_string(record.bytes));
  }
  if (!coming_now_->given_up) coming_now_->to = coming_now_->room.first(record.bytes);
  if (record.bytes == 0) arrived(0);
}

std::span<std::byte> Receives::room() {
  if (!coming_now_->given_up) return coming_now_->to.subspan(coming_now_->have);
  dropped_.resize(kShortPieceBytes);
  return std::span(dropped_).first(std::min<uint64_t>(kShortPieceBytes, coming_now_->record.bytes - coming_now_->have));
}

void Receives::arrived(size_t bytes) {
  coming_now_->have += bytes;
  if (coming_now_->have < coming_now_->record.bytes) return;
  const std::shared_ptr<Incoming> message = std::exchange(coming_now_, nullptr);
  if (message->given_up) {
    drop(message->record.number);
  } else if (message->delivery) {
    finish(*message);
  }
}

// A message that has no receive yet takes memory here, however short it is.
void Receives::count(Incoming& message) {
  message.counted = message.offered() ? 1 : earlyCost(message.record.bytes);
  uint64_t& counted = message.offered() ? early_offers_ : early_bytes_;
  counted += message.counted;
  if (early_bytes_ > most_early_) {
    throw WireError("messages without receives: expected at most " + std::to_string(most_early_) + " bytes, " +
                    std::to_string(kMessageCost) + " added for each, got " + std::to_string(early_bytes_));
  }
  // Messages that their sender has cancelled before they left come as offers too.
  const uint64_t most = 2 * (most_early_ / kMessageCost);
  if (early_offers_ <= most) return;
  throw WireError("offered messages without receives: expected at most " + std::to_string(most) + ", got " +
                  std::to_string(early_offers_));
}

void Receives::uncount(Incoming& message) {
  (message.offered() ? early_offers_ : early_bytes_) -= std::exchange(message.counted, 0);
}

// A message that has begun to come meets its receive, if that is posted.
void Receives::match(const std::shared_ptr<Incoming>& message) {
  const uint32_t tag = message->record.tag;
  if (const auto known = closed_.find(tag); known != closed_.end() && known->second) {
    message->given_up = true;
  } else if (auto receive = takePosted(tag)) {
    message->delivery = std::move(receive->delivery);
    message->room = receive->room;
    expectFits(message->record, message->room.size());
  } else {
    early_[tag].push_back(message);
  }
}

std::optional<Receives::Receive> Receives::takePosted(uint32_t tag) {
  const auto posted = posted_.find(tag);
  if (posted == posted_.end()) return {};
  Receive receive = std::move(posted->second.front());
  posted->second.pop_front();
  if (posted->second.empty()) posted_.erase(posted);
  return receive;
}

// Its receive is posted.
void Receives::want(Incoming& message) {
  message.is_wanted = true;
  out_.append({Record::Kind::wanted, 0, message.record.number, 0}, {}, /*place=*/0);
}

void Receives::finish(Incoming& message) {
  if (!message.own.empty()) std::memcpy(message.room.data(), message.own.data(), message.own.size());
  uncount(message);
  message.delivery->complete(message.record.bytes);
  out_.append({Record::Kind::delivered, 0, message.record.number, 0}, {}, /*place=*/0);
  reported_up_to_ = out_.end();
  coming_.erase(message.record.number);
}

void Receives::cancel(Incoming& message, const char* why) {
  if (std::exchange(message.given_up, true)) return;
  uncount(message);
  message.own = {};
  if (message.delivery) message.delivery->fail(Kind::cancelled, why);
}

// Nothing more comes of a message that was cancelled.
void Receives::drop(uint64_t number) {
  coming_.erase(number);
  dropped_ = {};
  out_.append({Record::Kind::dropped, 0, number, 0}, {}, /*place=*/0);
}

void Receives::cut() {
  if (coming_now_) cancel(*std::exchange(coming_now_, nullptr), kCancelledByPeer);
}

// The peer has cancelled the message; this record follows all others of the message.
void Receives::givenUp(uint64_t number) {
  if (number >= come_) {
    throw WireError("message given up: expected a number below " + std::to_string(come_) + ", got " +
                    std::to_string(number));
  }
  const auto message = coming_.find(number);
  if (message == coming_.end()) return;  // it was delivered or dropped before
  cancel(*message->second, kCancelledByPeer);
  drop(number);
}

void Receives::closeTag(uint32_t tag) {
  std::vector<uint64_t> over;
  for (auto& [number, message] : coming_) {
    if (message->record.tag != tag || message->given_up) continue;
    cancel(*message, kCancelledHere);
    const bool nothing_comes = message->offered() || message->have == message->record.bytes;
    if (!message->delivery && nothing_comes) over.push_back(number);
  }
  for (const uint64_t number : over)
    drop(number);
  early_.erase(tag);
  while (const auto receive = takePosted(tag))
    receive->delivery->fail(Kind::cancelled, kCancelledHere);
  out_.append({Record::Kind::closed, tag}, {}, /*place=*/0);
  if (!closed_.emplace(tag, true).second) closed_.erase(tag);  // nothing more comes of it
}

void Receives::closedByPeer(uint32_t tag) {
  const auto [known, is_new] = closed_.emplace(tag, false);
  if (is_new) {
    if (closed_.size() <= kMostClosedTags) return;
    throw WireError("closed tags: expected at most " + std::to_string(kMostClosedTags) + ", got more");
  }
  if (!known->second) throw WireError("tag closed: expected one that is not, got " + std::to_string(tag) + " again");
  closed_.erase(known);
}

void Receives::fail(Kind kind, const std::string& why) {
  for (auto& [tag, receives] : posted_) {
    for (Receive& receive : receives)
      receive.delivery->fail(kind, why);
  }
  for (auto& [number, message] : coming_) {
    if (message->delivery) message->delivery->fail(kind, why);
  }
  coming_.clear();
  posted_.clear();
  early_.clear();
  coming_now_ = nullptr;
}

}  // namespace lowcomm::tcp

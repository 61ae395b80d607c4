#include "transport/tcp/messages.h"

#include <cstring>

#include "base/error.h"

namespace lowcomm::tcp {

using Kind = TransportError::Kind;

namespace {

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
  undelivered_[sent_++] = {delivery, data, place, out_.end(), !is_unasked, is_unasked};
  return delivery;
}

Sends::Undelivered& Sends::undelivered(uint64_t number, const char* record) {
  const auto found = undelivered_.find(number);
  if (found != undelivered_.end()) return found->second;
  throw WireError(std::string("message ") + record + ": expected one under way, got number " + std::to_string(number));
}

void Sends::wanted(uint64_t number) {
  Undelivered& message = undelivered(number, "wanted");
  if (!std::exchange(message.is_offered, false))
    throw WireError("message wanted: expected one that was offered, got number " + std::to_string(number));
  --offered_;
  out_.append({Record::Kind::body, 0, number, message.data.size()}, message.data, message.place);
  message.end = out_.end();
}

void Sends::delivered(uint64_t number) {
  Undelivered& message = undelivered(number, "delivered");
  // Its sender would have its bytes again while they leave.
  if (message.end > out_.begin() || message.is_offered)
    throw WireError("message delivered: expected one that was sent, got number " + std::to_string(number));
  if (message.is_unasked) unasked_ -= earlyCost(message.data.size());
  message.delivery->complete(message.data.size());
  undelivered_.erase(number);
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
  const auto found = early_.lower_bound(first);
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
  if (!message->delivery) count(*message);
  if (message->offered()) {
    if (message->delivery) want(*message);
    return;
  }
  if (message->delivery) {
    message->to = message->room.first(record.bytes);
  } else {
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
  coming_now_->to = coming_now_->room.first(record.bytes);
  if (record.bytes == 0) arrived(0);
}

std::span<std::byte> Receives::room() {
  return coming_now_->to.subspan(coming_now_->have);
}

void Receives::arrived(size_t bytes) {
  coming_now_->have += bytes;
  if (coming_now_->have < coming_now_->record.bytes) return;
  const std::shared_ptr<Incoming> message = std::exchange(coming_now_, nullptr);
  if (message->delivery) finish(*message);
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
  const uint64_t most = most_early_ / kMessageCost;
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
  if (auto receive = takePosted(tag)) {
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

#include "transport/tcp/message_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace lowcomm::tcp {

using Kind = TransportError::Kind;

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

void MessageStream::expectLiving() const {
  if (failed_) throw TransportError(kind_, peer_, why_);
}

void MessageStream::expectFits(const Record& record, size_t room) const {
  if (record.bytes <= room) return;
  throw WireError("message with tag " + std::to_string(record.tag) + ": expected at most " + std::to_string(room) +
                  " bytes, got " + std::to_string(record.bytes));
}

// ---- out ----

std::shared_ptr<Delivery> MessageStream::send(uint32_t tag, std::span<const std::byte> data, uint64_t place,
                                              std::function<void()> then) {
  if (data.size() > kMostMessageBytes) {
    throw ValueError("tcp transport: expected a message of at most " + std::to_string(kMostMessageBytes) +
                     " bytes, got " + std::to_string(data.size()));
  }
  std::lock_guard lock(mutex_);
  expectLiving();
  const bool is_unasked = unasked_ + costOf(data.size()) <= most_early_;
  if (!is_unasked && offered_ == mostOffered()) {
    throw ValueError("tcp transport: expected at most " + std::to_string(mostOffered()) +
                     " messages to a peer that it has no receives for yet, got one more");
  }
  auto delivery = std::make_shared<Delivery>(std::move(then));
  undelivered_[sent_] = {delivery, data, place, 0, tag, !is_unasked, is_unasked};
  (is_unasked ? unasked_ : offered_) += is_unasked ? costOf(data.size()) : 1;
  if (is_unasked) {
    out_.append({Record::Kind::message, tag, sent_, data.size()}, data, place);
  } else {
    out_.append({Record::Kind::offered, tag, sent_, data.size()}, {}, place);
  }
  undelivered_[sent_++].end = out_.end();
  return delivery;
}

MessageStream::Undelivered& MessageStream::undelivered(uint64_t number, const char* word) {
  const auto found = undelivered_.find(number);
  if (found != undelivered_.end()) return found->second;
  throw WireError(std::string("message ") + word + ": expected one under way, got number " + std::to_string(number));
}

void MessageStream::wanted(uint64_t number) {
  Undelivered& message = undelivered(number, "wanted");
  if (message.given_up) return;  // and the peer is about to hear so
  if (!std::exchange(message.is_offered, false))
    throw WireError("message wanted: expected one that was offered, got number " + std::to_string(number));
  --offered_;
  out_.append({Record::Kind::body, 0, number, message.data.size()}, message.data, message.place);
  message.end = out_.end();
}

// The peer confirmed that a message was delivered, or dropped.
void MessageStream::delivered(uint64_t number, bool dropped) {
  Undelivered& message = undelivered(number, dropped ? "dropped" : "delivered");
  // Its sender would have its bytes again while they leave.
  const bool leaves = message.end > out_.begin() && out_.has(number);
  if (leaves || (message.is_offered && !message.given_up && !dropped))
    throw WireError("message delivered: expected one that was sent, got number " + std::to_string(number));
  if (message.is_unasked) unasked_ -= costOf(message.data.size());
  if (message.is_offered) --offered_;
  dropped ? message.delivery->fail(Kind::cancelled, kByPeer) : message.delivery->complete(message.data.size());
  undelivered_.erase(number);
}

// ---- in ----

std::shared_ptr<Delivery> MessageStream::receive(uint32_t tag, std::span<std::byte> room, std::function<void()> then) {
  std::lock_guard lock(mutex_);
  expectLiving();
  auto delivery = std::make_shared<Delivery>(std::move(then));
  const auto early = early_.find(tag);
  if (early == early_.end()) {
    posted_[tag].push_back({room, delivery});
    return delivery;
  }
  const std::shared_ptr<Incoming> message = std::move(early->second.front());
  early->second.pop_front();
  if (early->second.empty()) early_.erase(early);
  if (message->given_up) return delivery->fail(Kind::cancelled, kByPeer), delivery;
  if (message->offered()) uncount(*message);
  expectFits(message->record, room.size());
  message->room = room;
  message->delivery = delivery;
  delivery->came_early = true;
  if (message->offered()) {
    want(message);
  } else if (message->have == message->record.bytes) {
    finish(*message);
  }
  return delivery;
}

void MessageStream::acknowledge(std::chrono::milliseconds patience) {
  constexpr uint64_t kWordsAlone = 16 * 1024;  // so few bytes hold no message's body, or a short one
  std::unique_lock lock(mutex_);
  if (told_ > written_ + kWordsAlone) return;
  written_more_.wait_for(lock, patience, [&] { return failed_ || told_ <= written_; });
}

void MessageStream::wrote(uint64_t end) {
  written_ = end;
  written_more_.notify_all();
}

std::span<std::byte> MessageStream::room() {
  if (incoming_ && incoming_->given_up) {
    dropped_.resize(kShortPieceBytes);
    return std::span(dropped_).first(std::min<uint64_t>(kShortPieceBytes, incoming_->record.bytes - incoming_->have));
  }
  if (incoming_) return incoming_->to.subspan(incoming_->have);
  return std::span(header_).subspan(header_have_);
}

void MessageStream::arrived(size_t bytes) {
  in_ += bytes;
  if (!incoming_) {
    header_have_ += bytes;
    if (header_have_ < kRecordHeaderBytes) return;
    header_have_ = 0;
    begin(parseRecord(header_));
    if (!incoming_ || incoming_->record.bytes > 0) return;
  } else {
    incoming_->have += bytes;
    if (incoming_->have < incoming_->record.bytes) return;
  }
  const std::shared_ptr<Incoming> message = std::move(incoming_);
  incoming_ = nullptr;
  if (message->given_up) {
    drop(message->record.number);
  } else if (message->delivery) {
    finish(*message);
  }
}

void MessageStream::begin(const Record& record) {
  switch (record.kind) {
    case Record::Kind::message:
    case Record::Kind::offered:
      return beginMessage(record);
    case Record::Kind::body:
      return beginBody(record);
    case Record::Kind::delivered:
      return delivered(record.number, /*dropped=*/false);
    case Record::Kind::wanted:
      return wanted(record.number);
    case Record::Kind::given_up:
      return givenUp(record.number);
    case Record::Kind::dropped:
      return delivered(record.number, /*dropped=*/true);
    case Record::Kind::closed:
      return closedByPeer(record.tag);
  }
}

void MessageStream::beginMessage(const Record& record) {
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
    if (message->delivery) want(message);
    return;
  }
  if (message->delivery) {
    message->to = message->room.first(record.bytes);
  } else if (!message->given_up) {
    message->own.resize(record.bytes);
    message->to = message->own;
  }
  incoming_ = std::move(message);
}

// A message that has no receive yet takes memory here, however short it is.
void MessageStream::count(Incoming& message) {
  message.counted = message.offered() ? 1 : costOf(message.record.bytes);
  uint64_t& counted = message.offered() ? early_offers_ : early_bytes_;
  counted += message.counted;
  if (early_bytes_ > most_early_) {
    throw WireError("messages without receives: expected at most " + std::to_string(most_early_) + " bytes, " +
                    std::to_string(kMessageCost) + " added for each, got " + std::to_string(early_bytes_));
  }
  // Those that their sender has taken back before they left come as offers too.
  const uint64_t most = mostOffered() + most_early_ / kMessageCost;
  if (early_offers_ <= most) return;
  throw WireError("offered messages without receives: expected at most " + std::to_string(most) + ", got " +
                  std::to_string(early_offers_));
}

void MessageStream::uncount(Incoming& message) {
  (message.offered() ? early_offers_ : early_bytes_) -= std::exchange(message.counted, 0);
}

// A message that has begun to come meets its receive, if that is posted.
void MessageStream::match(const std::shared_ptr<Incoming>& message) {
  const uint32_t tag = message->record.tag;
  if (isClosedHere(tag)) {
    message->given_up = true;
  } else if (auto receive = takePosted(tag)) {
    message->delivery = std::move(receive->delivery);
    message->room = receive->room;
    expectFits(message->record, message->room.size());
  } else {
    early_[tag].push_back(message);
  }
}

std::optional<MessageStream::Receive> MessageStream::takePosted(uint32_t tag) {
  const auto posted = posted_.find(tag);
  if (posted == posted_.end()) return {};
  Receive receive = std::move(posted->second.front());
  posted->second.pop_front();
  if (posted->second.empty()) posted_.erase(posted);
  return receive;
}

void MessageStream::beginBody(const Record& record) {
  const auto message = coming_.find(record.number);
  if (message == coming_.end() || !std::exchange(message->second->is_wanted, false))
    throw WireError("body: expected that of a message that is wanted, got number " + std::to_string(record.number));
  incoming_ = message->second;
  if (incoming_->record.bytes != record.bytes) {
    throw WireError("body of message " + std::to_string(record.number) + ": expected " +
                    std::to_string(incoming_->record.bytes) + " bytes, got " + std::to_string(record.bytes));
  }
  if (!incoming_->given_up) incoming_->to = incoming_->room.first(record.bytes);
}

// Its receive is posted.
void MessageStream::want(const std::shared_ptr<Incoming>& message) {
  message->is_wanted = true;
  out_.append({Record::Kind::wanted, 0, message->record.number, 0}, {}, /*place=*/0);
}

void MessageStream::finish(Incoming& message) {
  if (!message.own.empty()) std::memcpy(message.room.data(), message.own.data(), message.own.size());
  uncount(message);
  message.delivery->complete(message.record.bytes);
  out_.append({Record::Kind::delivered, 0, message.record.number, 0}, {}, /*place=*/0);
  told_ = out_.end();
  coming_.erase(message.record.number);
}

// Nothing more comes of a message that was given up.
void MessageStream::drop(uint64_t number) {
  coming_.erase(number);
  dropped_ = {};
  out_.append({Record::Kind::dropped, 0, number, 0}, {}, /*place=*/0);
}

void MessageStream::cut() {
  if (header_have_ > 0) throw WireError("piece: expected no cut in the middle of a record, got one");
  if (incoming_) giveUp(*std::exchange(incoming_, nullptr), kByPeer);
}

std::optional<uint32_t> MessageStream::unclaimed(uint32_t first) {
  std::lock_guard lock(mutex_);
  const auto comes = [](const auto& message) { return !message->given_up; };
  const auto found = std::find_if(early_.lower_bound(first), early_.end(), [&](const auto& of_tag) {
    return std::any_of(of_tag.second.begin(), of_tag.second.end(), comes);
  });
  return found == early_.end() ? std::nullopt : std::optional(found->first);
}

// ---- the end ----

bool MessageStream::failed() {
  std::lock_guard lock(mutex_);
  return failed_;
}

void MessageStream::fail(Kind kind, const std::string& why) {
  std::lock_guard lock(mutex_);
  if (failed_) return;
  failed_ = true;
  kind_ = kind;
  why_ = why;
  for (auto& [number, message] : undelivered_)
    message.delivery->fail(kind, why);
  for (auto& [tag, receives] : posted_) {
    for (Receive& receive : receives)
      receive.delivery->fail(kind, why);
  }
  for (auto& [number, message] : coming_) {
    if (message->delivery) message->delivery->fail(kind, why);
  }
  undelivered_.clear();
  coming_.clear();
  posted_.clear();
  early_.clear();
  incoming_ = nullptr;
  out_.clear();
  written_more_.notify_all();
}

}  // namespace lowcomm::tcp

#include "transport/tcp/channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace lowcomm::tcp {

using Kind = TransportError::Kind;

void Delivery::complete() {
  {
    std::lock_guard lock(mutex_);
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

void Delivery::wait(int peer, std::chrono::milliseconds deadline) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, deadline, [&] { return done_ || failed_; })) {
    throw TransportError(Kind::timed_out, peer,
                         "Timed out waiting " + std::to_string(deadline.count()) + "ms for the message");
  }
  if (failed_) throw TransportError(kind_, peer, why_);
}

void Channel::expectLiving() const {
  if (failed_) throw TransportError(kind_, peer_, why_);
}

void Channel::expectFits(const Record& record, size_t room) const {
  if (record.bytes <= room) return;
  throw WireError("message with tag " + std::to_string(record.tag) + ": expected at most " + std::to_string(room) +
                  " bytes, got " + std::to_string(record.bytes));
}

// ---- out ----

void Channel::append(const Record& record, std::span<const std::byte> data, uint64_t place) {
  Part header{.begin = out_end_, .place = place, .header = {}};
  write(record, header.header);
  out_.push_back(header);
  out_end_ += kRecordHeaderBytes;
  if (data.empty()) return;
  out_.push_back({.begin = out_end_, .place = place, .header = {}, .data = data});
  out_end_ += data.size();
}

std::shared_ptr<Delivery> Channel::send(uint32_t tag, std::span<const std::byte> data, uint64_t place) {
  if (data.size() > kMostMessageBytes) {
    throw ValueError("tcp transport: expected a message of at most " + std::to_string(kMostMessageBytes) +
                     " bytes, got " + std::to_string(data.size()));
  }
  std::lock_guard lock(mutex_);
  expectLiving();
  auto delivery = std::make_shared<Delivery>();
  const bool is_unasked = unasked_ + data.size() <= kUnaskedBytes;
  undelivered_[sent_] = {delivery, data, place, !is_unasked, is_unasked};
  if (is_unasked) {
    unasked_ += data.size();
    append({Record::Kind::message, tag, sent_, data.size()}, data, place);
  } else {
    append({Record::Kind::offered, tag, sent_, data.size()}, {}, place);
  }
  ++sent_;
  return delivery;
}

Channel::Undelivered& Channel::undelivered(uint64_t number, const char* word) {
  const auto found = undelivered_.find(number);
  if (found != undelivered_.end()) return found->second;
  throw WireError(std::string("message ") + word + ": expected one under way, got number " + std::to_string(number));
}

void Channel::wanted(uint64_t number) {
  Undelivered& message = undelivered(number, "wanted");
  if (!std::exchange(message.is_offered, false))
    throw WireError("message wanted: expected one that was offered, got number " + std::to_string(number));
  append({Record::Kind::body, 0, number, message.data.size()}, message.data, message.place);
}

void Channel::delivered(uint64_t number) {
  Undelivered& message = undelivered(number, "delivered");
  if (message.is_offered)
    throw WireError("message delivered: expected one that was sent, got number " + std::to_string(number));
  if (message.is_unasked) unasked_ -= message.data.size();
  message.delivery->complete();
  undelivered_.erase(number);
}

std::deque<Channel::Part>::const_iterator Channel::partAt(uint64_t offset) const {
  const auto after =
      std::upper_bound(out_.begin(), out_.end(), offset, [](uint64_t at, const Part& part) { return at < part.begin; });
  return after == out_.begin() ? out_.end() : std::prev(after);
}

uint64_t Channel::placeOf(uint64_t offset) const {
  const auto part = partAt(offset);
  return part == out_.end() ? 0 : part->place;
}

size_t Channel::gather(uint64_t offset, size_t bytes, std::span<iovec> parts) const {
  size_t count = 0;
  for (auto part = partAt(offset); part != out_.end() && bytes > 0 && count < parts.size(); ++part) {
    const uint64_t skipped = offset - part->begin;
    const size_t here = std::min<size_t>(bytes, part->size() - skipped);
    if (here == 0) break;  // offset is the stream's end
    parts[count++] = {const_cast<std::byte*>(part->at()) + skipped, here};
    offset += here;
    bytes -= here;
  }
  return count;
}

void Channel::received(uint64_t offset) {
  if (offset < out_begin_ || offset > out_end_) {
    throw WireError("bytes received: expected " + std::to_string(out_begin_) + " ... " + std::to_string(out_end_) +
                    ", got " + std::to_string(offset));
  }
  out_begin_ = offset;
  while (!out_.empty() && out_.front().begin + out_.front().size() <= offset)
    out_.pop_front();
}

// ---- in ----

std::shared_ptr<Delivery> Channel::receive(uint32_t tag, std::span<std::byte> room, std::function<void()> then) {
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

std::span<std::byte> Channel::room() {
  if (incoming_) return incoming_->to.subspan(incoming_->have);
  return std::span(header_).subspan(header_have_);
}

void Channel::arrived(size_t bytes) {
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
  if (message->delivery) finish(*message);
}

void Channel::begin(const Record& record) {
  switch (record.kind) {
    case Record::Kind::message:
    case Record::Kind::offered:
      return beginMessage(record);
    case Record::Kind::body:
      return beginBody(record);
    case Record::Kind::delivered:
      return delivered(record.number);
    case Record::Kind::wanted:
      return wanted(record.number);
  }
}

void Channel::beginMessage(const Record& record) {
  if (record.number != come_) {
    throw WireError("number of a message: expected " + std::to_string(come_) + ", got " +
                    std::to_string(record.number));
  }
  ++come_;
  auto message = std::make_shared<Incoming>();
  message->record = record;
  const auto posted = posted_.find(record.tag);
  if (posted == posted_.end()) {
    early_[record.tag].push_back(message);
  } else {
    Receive receive = std::move(posted->second.front());
    posted->second.pop_front();
    if (posted->second.empty()) posted_.erase(posted);
    message->delivery = std::move(receive.delivery);
    message->room = receive.room;
    incoming_ = message;  // so that it fails with the channel
    expectFits(record, receive.room.size());
    incoming_ = nullptr;
  }
  if (message->offered()) {
    if (message->delivery) want(message);
    return;
  }
  if (message->delivery) {
    message->to = message->room.first(record.bytes);
  } else {
    early_bytes_ += record.bytes;
    if (early_bytes_ > kUnaskedBytes) {
      throw WireError("messages without receives: expected at most " + std::to_string(kUnaskedBytes) + " bytes, got " +
                      std::to_string(early_bytes_));
    }
    message->own.resize(record.bytes);
    message->to = message->own;
  }
  incoming_ = std::move(message);
}

void Channel::beginBody(const Record& record) {
  const auto message = wanted_.find(record.number);
  if (message == wanted_.end())
    throw WireError("body: expected that of a message that is wanted, got number " + std::to_string(record.number));
  incoming_ = std::move(message->second);
  wanted_.erase(message);
  if (incoming_->record.bytes != record.bytes) {
    throw WireError("body of message " + std::to_string(record.number) + ": expected " +
                    std::to_string(incoming_->record.bytes) + " bytes, got " + std::to_string(record.bytes));
  }
  incoming_->to = incoming_->room.first(record.bytes);
}

// Its receive is posted.
void Channel::want(const std::shared_ptr<Incoming>& message) {
  wanted_.emplace(message->record.number, message);
  append({Record::Kind::wanted, 0, message->record.number, 0}, {}, /*place=*/0);
}

void Channel::finish(Incoming& message) {
  if (!message.own.empty()) std::memcpy(message.room.data(), message.own.data(), message.own.size());
  early_bytes_ -= message.own.size();
  message.delivery->complete();
  append({Record::Kind::delivered, 0, message.record.number, 0}, {}, /*place=*/0);
}

// ---- the end ----

bool Channel::failed() {
  std::lock_guard lock(mutex_);
  return failed_;
}

void Channel::fail(Kind kind, const std::string& why) {
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
  if (incoming_ && incoming_->delivery) incoming_->delivery->fail(kind, why);
  for (auto& [number, message] : wanted_)
    message->delivery->fail(kind, why);
  undelivered_.clear();
  wanted_.clear();
  posted_.clear();
  early_.clear();
  incoming_ = nullptr;
  out_.clear();
  out_begin_ = out_end_;
}

}  // namespace lowcomm::tcp

// The part of a channel that gives up messages and closes tags (channel.h).
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "transport/tcp/message_stream.h"

namespace lowcomm::tcp {

using Kind = TransportError::Kind;

namespace {

constexpr const char* kHere = "the message was cancelled";
constexpr size_t kMostClosedTags = 1 << 20;  // by a peer, that this rank has yet to close

}  // namespace

// Returns the numbers of the tag's messages that this rank sends and has not given up, ascending.
std::vector<uint64_t> MessageStream::numbersOf(uint32_t tag) const {
  std::vector<uint64_t> numbers;
  for (const auto& [number, message] : undelivered_) {
    if (message.tag == tag && !message.given_up) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// `numbers`: of messages that this rank sends.
void MessageStream::giveUp(const std::vector<uint64_t>& numbers) {
  if (numbers.empty()) return;
  for (const uint64_t number : numbers) {
    undelivered_[number].given_up = true;
    out_.append({Record::Kind::given_up, 0, number, 0}, {}, /*place=*/0);
  }
  out_.giveUp(numbers);
  for (const uint64_t number : numbers)
    undelivered_[number].delivery->fail(Kind::cancelled, kHere);  // now the caller may free its bytes
}

void MessageStream::giveUp(Incoming& message, const char* why) {
  if (std::exchange(message.given_up, true)) return;
  uncount(message);
  message.own = {};
  if (message.delivery) message.delivery->fail(Kind::cancelled, why);
}

// The peer has given the message up; this record follows all others of the message.
void MessageStream::givenUp(uint64_t number) {
  if (number >= come_) {
    throw WireError("message given up: expected a number below " + std::to_string(come_) + ", got " +
                    std::to_string(number));
  }
  const auto message = coming_.find(number);
  if (message == coming_.end()) return;  // it was delivered or dropped before
  giveUp(*message->second, kByPeer);
  drop(number);
}

void MessageStream::closeTag(uint32_t tag) {
  std::lock_guard lock(mutex_);
  if (failed_) return;
  giveUp(numbersOf(tag));
  std::vector<uint64_t> over;
  for (auto& [number, message] : coming_) {
    if (message->record.tag != tag || message->given_up) continue;
    giveUp(*message, kHere);
    const bool nothing_comes = message->offered() || message->have == message->record.bytes;
    if (!message->delivery && nothing_comes) over.push_back(number);
  }
  for (const uint64_t number : over)
    drop(number);
  early_.erase(tag);
  while (const auto receive = takePosted(tag))
    receive->delivery->fail(Kind::cancelled, kHere);
  out_.append({Record::Kind::closed, tag}, {}, /*place=*/0);
  if (!closed_.emplace(tag, true).second) closed_.erase(tag);  // nothing more comes of it
}

void MessageStream::closedByPeer(uint32_t tag) {
  const auto [known, is_new] = closed_.emplace(tag, false);
  if (is_new) {
    if (closed_.size() <= kMostClosedTags) return;
    throw WireError("closed tags: expected at most " + std::to_string(kMostClosedTags) + ", got more");
  }
  if (!known->second) throw WireError("tag closed: expected one that is not, got " + std::to_string(tag) + " again");
  closed_.erase(known);
}

bool MessageStream::isClosedHere(uint32_t tag) const {
  const auto known = closed_.find(tag);
  return known != closed_.end() && known->second;
}

}  // namespace lowcomm::tcp

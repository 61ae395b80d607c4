// A channel gives up messages, and tags for good.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/tcp/channel.h"

namespace lowcomm::tcp {

using Kind = TransportError::Kind;

namespace {

constexpr const char* kHere = "the message was cancelled";
constexpr size_t kMostClosedTags = 1 << 20;  // by a peer, that this rank has yet to close

void expectBelow(uint64_t end, uint64_t number, const char* word) {
  if (number < end) return;
  throw WireError(std::string("message ") + word + ": expected a number below " + std::to_string(end) + ", got " +
                  std::to_string(number));
}

}  // namespace

// ---- messages that are cancelled ----

std::vector<Record> Channel::cancel(uint32_t tag) {
  std::lock_guard lock(mutex_);
  std::vector<Record> words;
  for (const uint64_t number : numbersOf(tag)) {
    giveUp(number, undelivered_[number], kHere);
    words.push_back({Record::Kind::given_up, tag, number});
  }
  for (auto& [number, message] : coming_) {
    if (message->record.tag != tag || !message->delivery || message->given_up) continue;
    giveUp(*message, kHere);
    words.push_back({Record::Kind::dropped, tag, number});
  }
  while (const auto receive = takePosted(tag)) {
    receive->delivery->fail(Kind::cancelled, kHere);
    ++forgone_[tag];
  }
  return words;
}

// Of messages that this rank sends and has not given up, in order.
std::vector<uint64_t> Channel::numbersOf(uint32_t tag) const {
  std::vector<uint64_t> numbers;
  for (const auto& [number, message] : undelivered_) {
    if (message.tag == tag && !message.given_up) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

void Channel::giveUp(uint64_t number, Undelivered& message, const char* why) {
  message.given_up = true;
  out_.append({Record::Kind::given_up, 0, number, 0}, {}, /*place=*/0);
  out_.giveUp(number);
  message.delivery->fail(Kind::cancelled, why);  // now the caller may free its bytes
}

void Channel::giveUp(Incoming& message, const char* why) {
  if (std::exchange(message.given_up, true)) return;
  early_bytes_ -= message.own.size();
  message.own = {};
  if (message.delivery) message.delivery->fail(Kind::cancelled, why);
}

void Channel::say(const Record& word) {
  std::lock_guard lock(mutex_);
  if (!failed_) out_.append(word, {}, /*place=*/0);
}

void Channel::hear(const Record& word) {
  std::lock_guard lock(mutex_);
  if (failed_) return;
  if (word.kind == Record::Kind::dropped) {
    expectBelow(sent_, word.number, "dropped");
    const auto message = undelivered_.find(word.number);
    if (message != undelivered_.end() && !message->second.given_up) giveUp(word.number, message->second, kByPeer);
    return;
  }
  if (word.number < come_) {
    if (const auto message = coming_.find(word.number); message != coming_.end()) giveUp(*message->second, kByPeer);
    return;
  }
  // All messages of the tag that are to come before it have been given up before: those that were under way, its
  // sender gives up together. So it is the next receive's.
  if (!foretold_.emplace(word.number, word.tag).second)
    throw WireError("message given up: expected one that was not before, got number " + std::to_string(word.number));
  if (takeForgone(word.tag)) return;
  if (const auto receive = takePosted(word.tag)) return receive->delivery->fail(Kind::cancelled, kByPeer);
  early_[word.tag].push_back(std::make_shared<Incoming>(Incoming{.given_up = true}));
}

// As the stream has it, behind all else of the message.
void Channel::givenUp(uint64_t number) {
  expectBelow(come_, number, "given up");
  const auto message = coming_.find(number);
  if (message == coming_.end()) return;  // it was delivered or dropped before
  giveUp(*message->second, kByPeer);
  drop(number);
}

// ---- tags that are closed ----

void Channel::closeTag(uint32_t tag) {
  std::lock_guard lock(mutex_);
  if (failed_) return;
  for (const uint64_t number : numbersOf(tag))
    giveUp(number, undelivered_[number], kHere);
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
  forgone_.erase(tag);
  while (const auto receive = takePosted(tag))
    receive->delivery->fail(Kind::cancelled, kHere);
  out_.append({Record::Kind::closed, tag}, {}, /*place=*/0);
  if (!closed_.emplace(tag, true).second) closed_.erase(tag);  // nothing more comes of it
}

void Channel::closedByPeer(uint32_t tag) {
  const auto [known, is_new] = closed_.emplace(tag, false);
  if (is_new) {
    if (closed_.size() <= kMostClosedTags) return;
    throw WireError("closed tags: expected at most " + std::to_string(kMostClosedTags) + ", got more");
  }
  if (!known->second) throw WireError("tag closed: expected one that is not, got " + std::to_string(tag) + " again");
  closed_.erase(known);
}

bool Channel::isClosedHere(uint32_t tag) const {
  const auto known = closed_.find(tag);
  return known != closed_.end() && known->second;
}

}  // namespace lowcomm::tcp

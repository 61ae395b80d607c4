#include "transport/tcp/store_table.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "base/cursor.h"
#include "base/error.h"

namespace lowcomm::tcp {
namespace {

using Kind = StoreMessage::Kind;

StoreMessage refusal(const std::string& why) {
  return {Kind::refused, 0, 0, {why}};
}

// How many texts a request has; nothing: any number, or of multi_set an even one.
std::optional<size_t> textsOf(Kind kind) {
  switch (kind) {
    case Kind::count:
    case Kind::list:
      return 0;
    case Kind::get:
    case Kind::add:
    case Kind::erase:
    case Kind::pop:
    case Kind::length:
      return 1;
    case Kind::set:
    case Kind::append:
    case Kind::push:
      return 2;
    case Kind::compare_set:
      return 3;
    default:
      return std::nullopt;
  }
}

}  // namespace

std::vector<std::byte> StoreMessage::bytes() const {
  size_t size = sizeof(uint32_t) * 2 + sizeof(uint64_t) * 2;
  for (const std::string& text : texts)
    size += sizeof(uint64_t) + text.size();
  std::vector<std::byte> bytes(size);
  Writer writer(bytes.data());
  writer.put(static_cast<uint32_t>(kind)).put(static_cast<uint32_t>(texts.size())).put(number).put(wait_ms);
  for (const std::string& text : texts)
    writer.put(static_cast<uint64_t>(text.size())).put(std::as_bytes(std::span(text)));
  return bytes;
}

StoreMessage StoreMessage::parse(std::span<const std::byte> bytes) {
  Cursor cursor(bytes, "store message");
  StoreMessage message;
  message.kind = static_cast<Kind>(cursor.read<uint32_t>("kind"));
  const auto count = cursor.read<uint32_t>("texts");
  message.number = cursor.read<int64_t>("number");
  message.wait_ms = cursor.read<uint64_t>("wait");
  for (uint32_t i = 0; i < count; ++i) {
    const auto text = cursor.take(cursor.read<uint64_t>("bytes of a text"), "text");
    message.texts.emplace_back(reinterpret_cast<const char*>(text.data()), text.size());
  }
  if (cursor.left() > 0)
    throw WireError("store message: expected its end, got " + std::to_string(cursor.left()) + " bytes more");
  return message;
}

// The values of all texts, once all of these keys have one.
std::optional<StoreMessage> StoreTable::values(const StoreMessage& request) const {
  StoreMessage answer;
  for (const std::string& key : request.texts) {
    const auto found = values_.find(key);
    if (found == values_.end()) return std::nullopt;
    if (request.kind != Kind::wait) answer.texts.push_back(found->second);
  }
  return answer;
}

std::optional<StoreMessage> StoreTable::answer(const StoreMessage& request) {
  const auto& texts = request.texts;
  const auto expected = textsOf(request.kind);
  if ((expected && texts.size() != *expected) || (request.kind == Kind::multi_set && texts.size() % 2 != 0)) {
    return refusal("store: expected " + (expected ? std::to_string(*expected) : std::string("an even number of")) +
                   " texts, got " + std::to_string(texts.size()));
  }
  StoreMessage done;
  switch (request.kind) {
    case Kind::set:
      values_[texts[0]] = texts[1];
      return done;
    case Kind::append:
      values_[texts[0]] += texts[1];
      return done;
    case Kind::multi_set:
      for (size_t i = 0; i < texts.size(); i += 2)
        values_[texts[i]] = texts[i + 1];
      return done;
    case Kind::get:
    case Kind::multi_get:
    case Kind::wait:
      return values(request);
    case Kind::add: {
      const std::string before = values_.contains(texts[0]) ? values_[texts[0]] : "0";
      const char* end = before.data() + before.size();
      if (const auto [at, error] = std::from_chars(before.data(), end, done.number); error != std::errc{} || at != end)
        return refusal("store: add: expected a number in '" + texts[0] + "', got '" + before.substr(0, 100) + "'");
      done.number += request.number;
      values_[texts[0]] = std::to_string(done.number);
      return done;
    }
    case Kind::compare_set: {
      const auto found = values_.find(texts[0]);
      const bool takes = found == values_.end() ? texts[1].empty() : found->second == texts[1];
      if (takes) values_[texts[0]] = texts[2];
      // Of a key that is not there the expected value, as TCPStore has it.
      done.texts = {takes ? texts[2] : found == values_.end() ? texts[1] : found->second};
      return done;
    }
    case Kind::erase:
      done.number = static_cast<int64_t>(values_.erase(texts[0]));
      return done;
    case Kind::check:
      done.number = std::all_of(texts.begin(), texts.end(), [&](const auto& key) { return values_.contains(key); });
      return done;
    case Kind::count:
      done.number = static_cast<int64_t>(values_.size());
      return done;
    case Kind::list:
      for (const auto& [key, value] : values_)
        done.texts.push_back(key);
      return done;
    case Kind::push:
      queues_[texts[0]].push_back(texts[1]);
      return done;
    case Kind::length: {
      const auto queue = queues_.find(texts[0]);
      done.number = queue == queues_.end() ? 0 : static_cast<int64_t>(queue->second.size());
      return done;
    }
    case Kind::pop: {
      const auto queue = queues_.find(texts[0]);
      if (queue == queues_.end()) return std::nullopt;
      done.texts = {std::move(queue->second.front())};
      queue->second.pop_front();
      if (queue->second.empty()) queues_.erase(queue);
      return done;
    }
    default:
      return refusal("store: expected a request, got kind " + std::to_string(static_cast<uint32_t>(request.kind)));
  }
}

}  // namespace lowcomm::tcp

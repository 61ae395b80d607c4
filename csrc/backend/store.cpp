#include "backend/store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "tensor/errors.h"
#include "tensor/python_state.h"

namespace lowcomm {
namespace {

using Kind = tcp::StoreMessage::Kind;
using std::chrono::milliseconds;

constexpr milliseconds kPatience{60000};  // for an answer to what does not wait

std::string textOf(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::vector<uint8_t> bytesOf(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string joined(const std::vector<std::string>& keys) {
  std::string all;
  for (const std::string& key : keys)
    all += (all.empty() ? "" : ", ") + key;
  return all;
}

}  // namespace

PortStore::PortStore(std::shared_ptr<tcp::StoreServer> server, std::shared_ptr<tcp::StoreClient> client,
                     milliseconds timeout)
    : c10d::Store(timeout), server_(std::move(server)), client_(std::move(client)) {}

c10::intrusive_ptr<PortStore> PortStore::serve(milliseconds timeout) {
  return translated([&] {
    auto server = std::make_shared<tcp::StoreServer>(tcp::Endpoint::shared());
    return c10::make_intrusive<PortStore>(std::move(server), nullptr, timeout);
  });
}

c10::intrusive_ptr<PortStore> PortStore::dial(const std::string& address, milliseconds timeout) {
  return translated([&] {
    std::shared_ptr<tcp::StoreClient> client;
    try {
      blocking([&] { client = std::make_shared<tcp::StoreClient>(tcp::Endpoint::shared(), address, timeout); });
    } catch (const TransportError& error) {
      TORCH_CHECK_WITH(DistNetworkError, false, "lowcomm: ", error.what());
    }
    return c10::make_intrusive<PortStore>(nullptr, std::move(client), timeout);
  });
}

// With a connection of its own: what waits for a key must not keep others from setting it.
c10::intrusive_ptr<c10d::Store> PortStore::clone() {
  if (client_) return dial(client_->address(), timeout_);
  return c10::make_intrusive<PortStore>(server_, client_, timeout_);
}

tcp::StoreMessage PortStore::call(Kind kind, std::vector<std::string> texts, int64_t number, milliseconds wait) {
  const tcp::StoreMessage request{kind, number, static_cast<uint64_t>(std::max<int64_t>(wait.count(), 0)),
                                  std::move(texts)};
  tcp::StoreMessage answer;
  try {
    blocking([&] { answer = server_ ? server_->call(request) : client_->call(request, kPatience); });
  } catch (const TransportError& error) {
    TORCH_CHECK_WITH(DistNetworkError, false, "lowcomm: ", error.what());
  } catch (...) {
    std::rethrow_exception(asTorchError(std::current_exception()));
  }
  TORCH_CHECK_VALUE(answer.kind != Kind::refused, "lowcomm: ", answer.texts.empty() ? "" : answer.texts[0]);
  return answer;
}

void PortStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  call(Kind::set, {key, textOf(value)});
}

std::vector<uint8_t> PortStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                           const std::vector<uint8_t>& desired) {
  return bytesOf(call(Kind::compare_set, {key, textOf(expected), textOf(desired)}).texts.at(0));
}

std::vector<uint8_t> PortStore::get(const std::string& key) {
  return multiGet({key})[0];
}

int64_t PortStore::add(const std::string& key, int64_t value) {
  return call(Kind::add, {key}, value).number;
}

bool PortStore::deleteKey(const std::string& key) {
  return call(Kind::erase, {key}).number > 0;
}

bool PortStore::check(const std::vector<std::string>& keys) {
  return call(Kind::check, keys).number > 0;
}

int64_t PortStore::getNumKeys() {
  return call(Kind::count, {}).number;
}

void PortStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const auto answer = call(Kind::wait, keys, 0, timeout);
  TORCH_CHECK_WITH(DistStoreError, answer.kind == Kind::ok, "wait timeout after ", timeout.count(),
                   "ms, keys: ", joined(keys));
}

void PortStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  call(Kind::append, {key, textOf(value)});
}

std::vector<std::vector<uint8_t>> PortStore::multiGet(const std::vector<std::string>& keys) {
  const auto answer = call(Kind::multi_get, keys, 0, timeout_);
  TORCH_CHECK_WITH(DistStoreError, answer.kind == Kind::ok && answer.texts.size() == keys.size(), "wait timeout after ",
                   timeout_.count(), "ms, keys: ", joined(keys));
  std::vector<std::vector<uint8_t>> values;
  for (const std::string& text : answer.texts)
    values.push_back(bytesOf(text));
  return values;
}

void PortStore::multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) {
  TORCH_CHECK_VALUE(keys.size() == values.size(), "lowcomm: store: expected a value a key, got ", keys.size(),
                    " keys and ", values.size(), " values");
  std::vector<std::string> texts;
  for (size_t i = 0; i < keys.size(); ++i) {
    texts.push_back(keys[i]);
    texts.push_back(textOf(values[i]));
  }
  call(Kind::multi_set, std::move(texts));
}

void PortStore::queuePush(const std::string& key, const std::vector<uint8_t>& value) {
  call(Kind::push, {key, textOf(value)});
}

std::vector<uint8_t> PortStore::queuePop(const std::string& key, bool block) {
  const auto answer = call(Kind::pop, {key}, 0, block ? timeout_ : milliseconds(0));
  if (answer.kind == Kind::ok) return bytesOf(answer.texts.at(0));
  TORCH_CHECK_WITH(DistStoreError, !block, "queue pop timeout after ", timeout_.count(), "ms, key: ", key);
  TORCH_CHECK_WITH(DistQueueEmptyError, false, "queue is empty: ", key);
}

int64_t PortStore::queueLen(const std::string& key) {
  return call(Kind::length, {key}).number;
}

std::vector<std::string> PortStore::listKeys() {
  return call(Kind::list, {}).texts;
}

}  // namespace lowcomm

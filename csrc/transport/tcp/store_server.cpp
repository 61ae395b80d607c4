#include "transport/tcp/store_server.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>

#include "base/error.h"

namespace lowcomm::tcp {

using Kind = StoreMessage::Kind;

GroupId storeGroup() {
  GroupId group;
  static_assert(sizeof(kStoreGroup) - 1 == sizeof(group));
  std::memcpy(group.data(), kStoreGroup, group.size());
  return group;
}

StoreServer::StoreServer(std::shared_ptr<Endpoint> endpoint) : endpoint_(std::move(endpoint)) {
  endpoint_->serve(storeGroup(), [this](const Hello& hello) { return admit(hello); });
  thread_ = std::thread([this] { loop(); });
}

StoreServer::~StoreServer() {
  endpoint_->serveNoMore(storeGroup());
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (const auto& [id, client] : clients_)
    endpoint_->remove(client->link);
}

// With the endpoint's lock, on its thread.
std::shared_ptr<Link> StoreServer::admit(const Hello& hello) {
  const ClientId id{hello.from, hello.incarnation};
  Route route{hello.group,       0, static_cast<int>(hello.from), hello.channel, endpoint_->incarnation(),
              hello.incarnation, {}};
  auto client = std::make_shared<Client>();
  client->link = std::make_shared<Link>(route);
  {
    std::lock_guard lock(mutex_);
    clients_[id] = client;
  }
  expectHeader(*client, id);
  return client->link;
}

void StoreServer::expectHeader(Client& client, const ClientId& id) {
  client.has_header = false;
  client.receiving = client.link->channel.receive(kStoreHeaderTag, client.header_in, [this, id] { note(id); });
}

// Something of a client has come, or its channel has ended.
void StoreServer::note(const ClientId& id) {
  std::lock_guard lock(mutex_);
  come_.push_back(id);
  changed_.notify_all();
}

void StoreServer::loop() {
  while (true) {
    std::optional<ClientId> id;
    std::optional<Clock::time_point> next;
    {
      std::lock_guard lock(table_mutex_);
      for (const Waiting& waiting : waiting_) {
        if (waiting.deadline && (!next || *waiting.deadline < *next)) next = waiting.deadline;
      }
    }
    {
      std::unique_lock lock(mutex_);
      const auto due = [&] { return stop_ || poked_ || !come_.empty(); };
      next ? changed_.wait_until(lock, *next, due) : changed_.wait_for(lock, std::chrono::seconds(1), due);
      if (stop_) return;
      poked_ = false;
      if (!come_.empty()) {
        id = come_.front();
        come_.pop_front();
      }
    }
    if (id) {
      try {
        hear(*id);
      } catch (const std::exception&) {  // its channel has ended, or it sends what no client does
        drop(*id);
      }
    }
    retry();
  }
}

// A client's bytes are there, or its channel has ended.
void StoreServer::hear(const ClientId& id) {
  std::shared_ptr<Client> client;
  {
    std::lock_guard lock(mutex_);
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    client = found->second;
  }
  if (client->ended) return drop(id);
  client->receiving->wait(static_cast<int>(id.first), std::chrono::milliseconds(0));
  if (!client->has_header) {
    uint64_t bytes;
    std::memcpy(&bytes, client->header_in.data(), sizeof(bytes));
    if (bytes > kMostStoreBytes) throw WireError("store: expected a shorter message");
    client->has_header = true;
    client->body_in.resize(bytes);
    client->receiving = client->link->channel.receive(kStoreBodyTag, client->body_in, [this, id] { note(id); });
    return;
  }
  StoreMessage request = StoreMessage::parse(client->body_in);
  Waiting waiting{std::move(request), {}, id, nullptr, nullptr};
  take(std::move(waiting));
}

// Answers a request, or lets it wait.
void StoreServer::take(Waiting waiting) {
  std::lock_guard lock(table_mutex_);
  const auto done = table_.answer(waiting.request);
  if (done) return answer(waiting, *done);
  if (waiting.request.wait_ms == 0) return answer(waiting, {Kind::timed_out, 0, 0, {}});
  // A time that no clock reaches is none.
  constexpr uint64_t kLongest = uint64_t{1000} * 60 * 60 * 24 * 365;
  waiting.deadline = Clock::now() + std::chrono::milliseconds(std::min(waiting.request.wait_ms, kLongest));
  waiting_.push_back(std::move(waiting));
}

// With the table's lock.
void StoreServer::answer(const Waiting& waiting, const StoreMessage& message) {
  if (!waiting.client) {
    *waiting.answer = message;
    *waiting.answered = true;
    answered_.notify_all();
    return;
  }
  std::shared_ptr<Client> client;
  {
    std::lock_guard lock(mutex_);
    const auto found = clients_.find(*waiting.client);
    if (found == clients_.end()) return;
    client = found->second;
  }
  client->body_out = message.bytes();  // the one before has arrived: another request came
  const uint64_t bytes = client->body_out.size();
  std::memcpy(client->header_out.data(), &bytes, sizeof(bytes));
  try {
    client->link->channel.send(kStoreHeaderTag, client->header_out, endpoint_->takePlace());
    client->link->channel.send(kStoreBodyTag, client->body_out, endpoint_->takePlace());
    expectHeader(*client, *waiting.client);
    endpoint_->wake();
  } catch (const TransportError&) {
    client->ended = true;
    note(*waiting.client);
  }
}

// Requests that waited: answered now, or over.
void StoreServer::retry() {
  std::lock_guard lock(table_mutex_);
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    auto done = table_.answer(waiting->request);
    if (!done && waiting->deadline && Clock::now() >= *waiting->deadline) done = {Kind::timed_out, 0, 0, {}};
    if (!done) {
      ++waiting;
      continue;
    }
    answer(*waiting, *done);
    waiting = waiting_.erase(waiting);
  }
}

StoreMessage StoreServer::call(const StoreMessage& request) {
  StoreMessage message;
  bool answered = false;
  take({request, {}, {}, &message, &answered});
  {
    std::lock_guard lock(mutex_);
    poked_ = true;  // what waited may have come, and a new deadline is to be kept
    changed_.notify_all();
  }
  std::unique_lock lock(table_mutex_);
  answered_.wait(lock, [&] { return answered; });
  return message;
}

void StoreServer::drop(const ClientId& id) {
  std::shared_ptr<Client> client;
  {
    std::lock_guard lock(mutex_);
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    client = found->second;
    clients_.erase(found);
  }
  {
    std::lock_guard lock(table_mutex_);
    waiting_.remove_if([&](const Waiting& waiting) { return waiting.client == id; });
  }
  endpoint_->remove(client->link);
}

}  // namespace lowcomm::tcp

#include "transport/tcp/store_client.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "base/error.h"
#include "transport/tcp/store_server.h"

namespace lowcomm::tcp {

using Kind = TransportError::Kind;
using std::chrono::milliseconds;

StoreClient::StoreClient(std::shared_ptr<Endpoint> endpoint, const std::string& address, milliseconds timeout)
    : endpoint_(std::move(endpoint)), address_(address) {
  dial(timeout);
}

StoreClient::~StoreClient() {
  if (link_) endpoint_->remove(link_);
}

// A port that refuses may be one whose server has yet to start: it is dialled until the time is over.
void StoreClient::dial(milliseconds timeout) {
  const auto end = Clock::now() + timeout;
  std::random_device device;
  const auto rank = static_cast<int>(1 + device() % 0x7ffffffe);
  Route route;
  route.group = storeGroup();
  route.rank = rank;
  route.incarnation = endpoint_->incarnation();
  route.tls = endpoint_->tls();
  route.dials = true;
  for (const Address& one : resolve(address_, "address of the store"))
    route.addresses.emplace_back(address_, one);
  std::string why = "no connection was made yet";
  while (Clock::now() < end) {
    link_ = std::make_shared<Link>(route);
    endpoint_->add(link_);
    while (Clock::now() < end && !link_->channel.failed()) {
      if (endpoint_->locked([&] { return link_->connections() > 0; })) return;
      std::this_thread::sleep_for(milliseconds(2));
    }
    try {
      if (link_->channel.failed()) link_->channel.send(0, {});  // throws why
    } catch (const TransportError& error) {
      why = error.what();
    }
    endpoint_->remove(link_);
    link_ = nullptr;
    std::this_thread::sleep_for(milliseconds(20));
  }
  throw TransportError(
      Kind::timed_out, 0,
      "expected a store at " + address_ + " within " + std::to_string(timeout.count()) + " ms, got none: " + why);
}

StoreMessage StoreClient::call(const StoreMessage& request, milliseconds patience) {
  std::lock_guard lock(mutex_);
  if (!link_) throw TransportError(Kind::closed, 0, "the store at " + address_ + " is gone");
  body_out_ = request.bytes();
  if (body_out_.size() > kMostStoreBytes) {
    throw ValueError("store: expected keys and values of at most " + std::to_string(kMostStoreBytes) +
                     " bytes together, got " + std::to_string(body_out_.size()));
  }
  const uint64_t size = body_out_.size();
  std::memcpy(header_out_.data(), &size, sizeof(size));
  // The server keeps the request's time; this is for a server that is gone.
  constexpr uint64_t kLongest = uint64_t{1000} * 60 * 60 * 24 * 365;
  const milliseconds longest = patience + milliseconds(std::min(request.wait_ms, kLongest));
  Channel& channel = link_->channel;
  try {
    const auto header = channel.receive(kStoreHeaderTag, header_in_);
    channel.send(kStoreHeaderTag, header_out_, endpoint_->takePlace());
    channel.send(kStoreBodyTag, body_out_, endpoint_->takePlace());
    endpoint_->wake();
    header->wait(0, longest);
    uint64_t bytes;
    std::memcpy(&bytes, header_in_.data(), sizeof(bytes));
    if (bytes > kMostStoreBytes) throw WireError("store: expected a shorter answer");
    body_in_.resize(bytes);
    channel.receive(kStoreBodyTag, body_in_)->wait(0, patience);
    return StoreMessage::parse(body_in_);
  } catch (const TransportError& error) {
    // Half a conversation is none: the spans are not to be touched any more, and nobody speaks to this server again.
    endpoint_->remove(std::exchange(link_, nullptr));
    throw TransportError(error.kind, 0, "the store at " + address_ + ": " + error.what());
  }
}

}  // namespace lowcomm::tcp

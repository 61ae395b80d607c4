#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/tcp/endpoint.h"
#include "transport/tcp/store_table.h"

namespace lowcomm::tcp {

// A client of the store that another process serves on its endpoint's port (StoreServer). Thread-safe: one request at a
// time.
class StoreClient {
 public:
  // Returns once it is connected. `address`: "host:port". TransportError, timed_out, where nobody serves a store there
  // within `timeout`; ValueError for an address that is none.
  StoreClient(std::shared_ptr<Endpoint> endpoint, const std::string& address, std::chrono::milliseconds timeout);
  ~StoreClient();

  const std::string& address() const { return address_; }

  // Sends the request and waits for its answer, for as long as the request waits and `patience`. TransportError where
  // the server is gone or says nothing.
  StoreMessage call(const StoreMessage& request, std::chrono::milliseconds patience);

 private:
  void dial(std::chrono::milliseconds timeout);

  const std::shared_ptr<Endpoint> endpoint_;
  const std::string address_;
  std::mutex mutex_;
  std::shared_ptr<Link> link_;
  std::array<std::byte, kStoreHeaderBytes> header_out_, header_in_;
  std::vector<std::byte> body_out_, body_in_;
};

}  // namespace lowcomm::tcp

#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "side_by_side.h"
#include "transport/tcp/tcp.h"
#include "transport/transport_cases.h"

namespace lowcomm {

class MapRendezvous final : public Rendezvous {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, milliseconds timeout = kLong) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return values_.contains(key); })) throw std::runtime_error("no " + key);
    return values_.at(key);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

inline tcp::Secret aSecret(char first = 'b') {
  return {first + std::string("0pBTzHWtmPlKzjrLn7SdrZxdFKFEE9lbYgOxDY3xPI"), "test"};
}

// With and without a secret: nothing else may differ.
//   INSTANTIATE_TEST_SUITE_P(Tcp, Name, secretOrNot(), secretName);
class SecretOrNot : public testing::TestWithParam<bool> {
 protected:
  std::optional<tcp::Secret> secret() const { return GetParam() ? std::optional(aSecret()) : std::nullopt; }
};

inline auto secretOrNot() {
  return testing::ValuesIn(tcp::tlsLibrary().empty() ? std::vector{false} : std::vector{false, true});
}

inline std::string secretName(const testing::TestParamInfo<bool>& info) {
  return info.param ? "Secret" : "Plain";
}

// `rate`: of the bulk lanes (tcp::Pace); empty: none.
inline tcp::EndpointOptions onLoopback(std::optional<tcp::Secret> secret = {}, const std::string& rate = "") {
  return {.listen = "127.0.0.1:0", .rate = rate, .secret = std::move(secret)};
}

// Ranks as threads, each with an endpoint of its own, as processes have; and what each one's connecting ended with:
// "rank <its peer>: <why>", or nothing.
struct UnlikeRanks {
  explicit UnlikeRanks(const std::vector<tcp::EndpointOptions>& options, int connections = 1)
      : transports(options.size()), errors(options.size()) {
    for (const tcp::EndpointOptions& one : options)
      endpoints.push_back(std::make_shared<tcp::Endpoint>(one));
    each([&](int rank) {
      try {
        const int size = static_cast<int>(options.size());
        transports[rank] = connectTcp(rendezvous, rank, size, connections, kLong, endpoints[rank]);
      } catch (const TransportError& error) {
        errors[rank] = "rank " + std::to_string(error.peer) + ": " + error.what();
      }
    });
  }

  void each(const std::function<void(int rank)>& part) { test::sideBySide(endpoints.size(), part); }

  MapRendezvous rendezvous;
  std::vector<std::shared_ptr<tcp::Endpoint>> endpoints;
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<std::string> errors;
};

// Ranks that are alike, and connected.
struct Ranks : UnlikeRanks {
  explicit Ranks(int size, int connections = 2, const std::optional<tcp::Secret>& secret = {},
                 const std::string& rate = "")
      : UnlikeRanks(std::vector<tcp::EndpointOptions>(size, onLoopback(secret, rate)), connections) {
    for (const std::string& error : errors)
      EXPECT_EQ(error, "");
  }

  Transport& operator[](int rank) { return *transports[rank]; }
};

// A connection to it, of nobody's.
inline tcp::Fd dial(const tcp::Endpoint& endpoint) {
  const tcp::Address address = tcp::resolve(endpoint.addresses()[0], "test").front();
  tcp::Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(fd.get(), address.get(), address.size), 0);
  return fd;
}

}  // namespace lowcomm

#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/tcp/store_client.h"
#include "transport/tcp/store_server.h"

namespace lowcomm {

// torch's store on the port of the transport (transport/tcp): rank 0's endpoint serves it, other processes dial it.
// Semantics and errors are those of torch's TCPStore: DistStoreError for a key that does not come in time, and
// DistNetworkError where the server is gone.
class PortStore final : public c10d::Store {
 public:
  // Serves it in this process, on the port of Endpoint::shared(). ValueError where that cannot listen, or serves one.
  static c10::intrusive_ptr<PortStore> serve(std::chrono::milliseconds timeout);

  // Of the process that serves it at `address` ("host:port"). DistNetworkError where none does within `timeout`.
  static c10::intrusive_ptr<PortStore> dial(const std::string& address, std::chrono::milliseconds timeout);

  // Of a clone; use the two above. One of `server` and `client` is null.
  PortStore(std::shared_ptr<tcp::StoreServer> server, std::shared_ptr<tcp::StoreClient> client,
            std::chrono::milliseconds timeout);

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  void queuePush(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override;
  std::vector<std::string> listKeys() override;

 private:
  tcp::StoreMessage call(tcp::StoreMessage::Kind kind, std::vector<std::string> texts, int64_t number = 0,
                         std::chrono::milliseconds wait = std::chrono::milliseconds(0));

  const std::shared_ptr<tcp::StoreServer> server_;
  const std::shared_ptr<tcp::StoreClient> client_;
};

}  // namespace lowcomm

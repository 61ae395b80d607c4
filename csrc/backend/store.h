#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/tcp/tunnel.h"

namespace lowcomm {

// torch's TCPStore, whose bytes travel on the port of the transport (transport/tcp/tunnel.h): rank 0's server listens
// on loopback, other processes reach it by the tunnel. Its semantics and errors are TCPStore's, with two additions: a
// value that TCPStore's server hangs up on is refused before it is sent, and what changes the store has reached the
// server when it returns. TCPStore leaves some changes to the kernel, which sends them even if the process ends; a
// tunnel ends with its process.
class PortStore final : public c10d::TCPStore {
 public:
  // The longest value that TCPStore's server takes.
  static constexpr size_t kMostBytes = size_t{8} << 20;

  // The server, on the port of Endpoint::shared(), for a job of so many `ranks` (TunnelExit). ValueError where that
  // cannot listen, or serves one.
  static c10::intrusive_ptr<PortStore> serve(std::chrono::milliseconds timeout, size_t ranks);

  // Connects to the process that serves the store at `address` ("host:port"). DistNetworkError if no process answers
  // within `timeout`.
  static c10::intrusive_ptr<PortStore> dial(const std::string& address, std::chrono::milliseconds timeout);

  // Use the two above. One of the three is not null; `server`: of which this is a clone.
  PortStore(const c10d::TCPStoreOptions& options, std::shared_ptr<tcp::TunnelExit> exit,
            std::shared_ptr<tcp::TunnelEntry> entry, c10::intrusive_ptr<c10d::Store> server);

  // The clone has its own connection, so a wait for a key does not block other requests.
  c10::intrusive_ptr<c10d::Store> clone() override;

  // Each throws ValueError for a value of more than kMostBytes.
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override;
  void queuePush(const std::string& key, const std::vector<uint8_t>& value) override;

 private:
  void reachServer();

  const std::shared_ptr<tcp::TunnelExit> exit_;
  const std::shared_ptr<tcp::TunnelEntry> entry_;
  const c10::intrusive_ptr<c10d::Store> server_;
};

}  // namespace lowcomm

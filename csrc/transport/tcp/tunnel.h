#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "transport/tcp/forwarder.h"

namespace lowcomm::tcp {

// A tunnel by which processes reach a TCP server of one of them on the port of its endpoint: encrypted and
// authenticated where there is a secret, and resumed where a connection is lost. The server listens on loopback; so
// does the tunnel's entry in each other process, which that process's client connects to.

// The group under whose id clients come: 16 bytes. The exit is its rank 0; a stream of a client is a rank of a number
// that it draws.
inline constexpr const char kTunnelGroup[] = "lowcomm's store ";

GroupId tunnelGroup();

// The server's process: what comes by a stream goes to 127.0.0.1:`port`, by a connection of its own, and back.
//
// A stream from a client that has not shown the secret takes one of kStreams + 8 · ranks places, and an address has
// kOfAHost + 4 · ranks of them. `ranks`: how many the job has; each may have several streams. Where there is no room,
// the oldest stream without a connection is closed; if all have one, the new stream is refused.
class TunnelExit {
 public:
  static constexpr size_t kStreams = Strangers::kHalfOpen, kOfAHost = Strangers::kOfAHost;

  // ValueError where the endpoint has one already.
  TunnelExit(std::shared_ptr<Endpoint> endpoint, uint16_t port, size_t ranks);
  ~TunnelExit();

 private:
  struct Client {
    std::string host;
    std::weak_ptr<Link> link;
  };

  std::shared_ptr<Link> admit(const Hello& hello, const std::string& host);
  bool makeRoom(const std::string& host);

  const std::shared_ptr<Endpoint> endpoint_;
  const uint16_t port_;
  const size_t most_, most_of_host_;
  std::list<Client> clients_;  // that have not shown the secret; of the endpoint's thread
  Forwarder forwarder_;
};

// A client's process: one connection that the process makes to 127.0.0.1:port() leads to the server. Connections
// of other processes of the machine, which see the port too, are closed.
class TunnelEntry {
 public:
  // `address`: "host:port" of the endpoint that has the exit, which is dialled until it answers, because its process
  // may not have started yet. TransportError, timed_out, if it does not answer within `timeout`; ValueError for an
  // invalid address.
  TunnelEntry(std::shared_ptr<Endpoint> endpoint, std::string address, std::chrono::milliseconds timeout);

  const std::string& address() const { return address_; }
  uint16_t port() const { return port_; }

 private:
  std::shared_ptr<Link> dial(std::chrono::milliseconds timeout) const;

  const std::shared_ptr<Endpoint> endpoint_;
  const std::string address_;
  uint16_t port_ = 0;
  Forwarder forwarder_;
};

// A listening socket on a port of 127.0.0.1 that the system picks. ValueError if no port is free.
std::pair<Fd, uint16_t> listenOnLoopback();

}  // namespace lowcomm::tcp

#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/tcp/endpoint.h"

namespace lowcomm::tcp {

// Carries the bytes of local sockets to another process: each socket has a channel, whose other end has a socket there
// (FORMAT.md: A byte stream). The bytes go as messages of tag 0. So they come in order and once, also where the
// channel's connection is lost and made again.
//
// A process holds at most kMessages of kMessageBytes of each direction of a stream: no more is read from a socket
// before the other process has written what was read before.
//
// A stream closes its socket and its channel: when the peer of the socket has closed it and all its bytes are
// delivered; when the channel has ended and all received bytes are written; when the channel has had no connection for
// kWithoutConnection. One thread for all streams. Thread-safe.
class Forwarder {
 public:
  static constexpr size_t kMessageBytes = 64 * 1024, kMessages = 4;
  static constexpr uint64_t kMostEarly = kMessages * (kMessageBytes + kMessageCost);  // of its channels (Route)
  static constexpr std::chrono::seconds kWithoutConnection{60};

  // `what`: begins the line that is logged when a channel fails; empty: nothing is logged.
  Forwarder(std::shared_ptr<Endpoint> endpoint, std::string what);

  // All streams end at once.
  ~Forwarder();

  // A stream between a socket, which does not block, and a link, which the endpoint has or is about to have. A socket
  // that listens stands for the first connection to it from this process; connections of other processes, which see the
  // port too, are closed. May be called with the links' lock.
  void add(Fd socket, std::shared_ptr<Link> link, bool listens = false);

 private:
  struct Sending {
    std::vector<std::byte> bytes;
    std::shared_ptr<Delivery> delivery;
  };
  struct Stream {
    Fd socket;
    std::shared_ptr<Link> link;
    bool listens = false;
    std::deque<Sending> sending = {};  // read from the socket, and not delivered
    bool is_read = false;              // the socket says no more
    std::vector<std::byte> come = std::vector<std::byte>(kMessageBytes);
    size_t begin = 0, end = 0;  // of `come`: what is to be written to the socket
    std::shared_ptr<Delivery> receiving = {};
  };

  void run();
  void turn();
  bool move(Stream& stream);
  void fill(Stream& stream);
  void drain(Stream& stream);
  bool enter(Stream& stream);

  const std::shared_ptr<Endpoint> endpoint_;
  const std::string what_;
  Waker waker_;
  std::atomic<bool> stop_{false};
  std::list<Stream> streams_;  // of the thread
  std::vector<std::byte> read_ = std::vector<std::byte>(kMessageBytes);
  std::mutex mutex_;
  std::list<Stream> added_;
  std::thread thread_;
};

}  // namespace lowcomm::tcp

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace lowcomm {

// Each lane has connections of its own, so a short control message never queues behind bulk data.
enum class Lane : uint8_t { control = 0, bulk = 1 };
inline constexpr int kLanes = 2;

// A transfer failed. `peer` is the group rank at the other end.
struct TransportError : std::runtime_error {
  enum class Kind { timed_out, closed, cancelled };
  TransportError(Kind kind, int peer, const std::string& why) : std::runtime_error(why), kind(kind), peer(peer) {}
  Kind kind;
  int peer;
};

// One message under way. Dropping it before it is done does not stop it: its span must stay valid until wait() has
// returned or Transport::cancel() has.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // Blocks until the message has left (send) or arrived (receive). Throws TransportError: timed_out when it has not
  // after `deadline`, closed when the peer is gone, cancelled after Transport::cancel.
  virtual void wait(std::chrono::milliseconds deadline) = 0;
};

// Whether a transfer has ended, one way or the other, within `patience`.
inline bool isOver(Transfer& transfer, std::chrono::milliseconds patience = std::chrono::milliseconds(0)) {
  try {
    transfer.wait(patience);
  } catch (const TransportError& error) {
    return error.kind != TransportError::Kind::timed_out;
  }
  return true;
}

// A transport reports this of each of its connections to a peer.
struct ConnectionReport {
  int peer = 0;
  Lane lane = Lane::control;
  int number = 0;                               // of its lane's, from 0
  bool is_connected = false;                    // at the moment
  uint64_t times_made = 0;                      // once, and again after each cut
  uint64_t sent_bytes = 0, received_bytes = 0;  // headers and bytes sent again included, those of TCP and below not
  uint64_t retransmitted = 0;                   // segments, by the kernel
  // Of the connection that there is, by the kernel: bytes, and the time in which the sender or the network had some,
  // without that in which the receiver had no room.
  uint64_t acknowledged_bytes = 0;
  double busy_s = 0;
  double round_trip_s = 0, least_round_trip_s = 0;
  std::string congestion;  // the kernel's congestion control
  std::string cipher;      // empty: none
  std::string path;        // "direct", or "relay " and its address; empty where there is no connection
};

// Moves bytes between the ranks of one group, in order for a given (lane, peer, tag). Thread-safe.
//
// A receive may be longer than the message that arrives (the frame header says how much counts), never shorter.
// Collectives therefore always receive into buffers of the group's agreed frame capacity, whatever they expect.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Both return at once, and `data` must live until the transfer is over. Post every receive before the sends that
  // answer it, or the exchange runs half-duplex.
  virtual std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) = 0;
  virtual std::unique_ptr<Transfer> irecv(Lane lane, int peer, uint32_t tag, std::span<std::byte> data) = 0;

  // Ends the lane for good: pending and later transfers fail as cancelled, peers see the connection close, and no span
  // handed over is touched after the return. Callable from any thread, any number of times.
  virtual void cancel(Lane lane) = 0;

  // The lowest tag of `first` ... `end` - 1 with a message that has begun to come from the peer and has no receive.
  virtual std::optional<uint32_t> unclaimed(Lane lane, int peer, uint32_t first, uint32_t end) = 0;

  // Before an op ends, and maybe the process with it: returns when the kernel has the short messages that were sent,
  // and what peers are told of those that came, which ends their sends. Does not wait where long messages are before
  // it, nor long for a connection that is lost.
  virtual void acknowledge() {}

  // One a connection, by peer and lane; none where the transport has no connections.
  virtual std::vector<ConnectionReport> report() const { return {}; }
};

// Where the ranks of a group that is being made leave values for each other, before any connection between them exists.
// A key is set by one rank, once. A transport is made by one function of a Rendezvous, the rank and the group's size,
// which returns once all ranks have called it.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // Returns the value of a key once it has one. Throws an exception, whose text is one line, if it has none after
  // `timeout` or cannot be read.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

}  // namespace lowcomm

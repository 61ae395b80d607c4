#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/tcp/admission.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/link.h"
#include "transport/tcp/pace.h"
#include "transport/tcp/secure.h"
#include "transport/tcp/socket.h"

namespace lowcomm::tcp {

// One listening port and one thread, which all groups of a process share. The thread does all reading and writing, by
// poll(): a process has some dozens of connections, and a loop of a page serves them as well as a library would.
//
// Messages leave in the order in which they were sent, whichever channel they go by, those of the control lane before
// others: the next is not begun before the kernel has taken the one before, or has not for too long (Link::patience).
// So ranks that send to each other in an order in which no two send to the same one keep to it, and links are shared by
// no more flows than need be (the kernel holds little unsent: connection.cpp).
//
// Connections that others make go through Admission. With a secret, all connections are TLS, in both directions.
class Endpoint {
 public:
  // ValueError where it cannot listen, or where there is a secret and no TLS.
  explicit Endpoint(const EndpointOptions& options);
  ~Endpoint();

  // This process's endpoint, made with the environment's options; it lives while a group has it. ValueError if the
  // environment has another secret by now.
  static std::shared_ptr<Endpoint> shared();

  uint64_t incarnation() const { return incarnation_; }
  // The address of the relay that ranks of this process use; empty: another rank.
  const std::string& relay() const { return relay_address_; }

  // Connections that it joins, and the bytes that it has passed on between them.
  std::pair<size_t, uint64_t> relayed();

  const std::vector<std::string>& addresses() const { return admission_.addresses(); }
  const std::shared_ptr<Tls>& tls() const { return tls_; }  // null: without a secret

  void add(const std::shared_ptr<Link>& link);

  // The link's channel ends; nothing of it is touched afterwards. What it said last is still brought to the peer, also
  // where the endpoint is destroyed meanwhile, which then takes up to kStays. So do pairs that it relays.
  static constexpr std::chrono::seconds kStays{2};
  void remove(const std::shared_ptr<Link>& link);

  // MessageStream::send and receive. A message leaves after all that this process has sent before.
  std::shared_ptr<Delivery> send(MessageStream& channel, uint32_t tag, std::span<const std::byte> data,
                                 std::function<void()> then = {});
  std::shared_ptr<Delivery> receive(MessageStream& channel, uint32_t tag, std::span<std::byte> room,
                                    std::function<void()> then = {});

  // Calls with the links' lock, while the thread rests.
  template <class F>
  auto locked(F&& f) {
    std::lock_guard lock(mutex_);
    return f();
  }

  // Calls with what admits connections from outside, and the links' lock.
  template <class F>
  auto withAdmission(F&& f) {
    std::lock_guard lock(mutex_);
    return f(admission_);
  }

  // For tests: accepts no connections from now on, like an endpoint whose address has changed.
  void deafen();

  // For tests: closes every connection at once, as a network does that resets them.
  void cut();

 private:
  void run();
  void turn();
  void failAll(const std::string& why);
  void wake() { waker_.wake(); }         // there is something to write
  std::chrono::milliseconds writeAll();  // returns for how long nothing more can be done
  void halt();
  bool stays();

  Waker waker_;
  const uint64_t incarnation_;
  const std::shared_ptr<Tls> tls_;
  const std::string relay_address_;
  Pace pace_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> places_{0};

  std::mutex mutex_;  // of all below
  std::vector<std::shared_ptr<Link>> links_;
  Admission admission_;
  LastBytes last_bytes_;
  Clock::time_point tick_at_{}, stays_until_{};
  std::chrono::milliseconds patience_{0};  // of the next poll()
  std::thread thread_;
};

// For threads that wait for the endpoint's: the time until `end`, at least a millisecond; a pause of some milliseconds,
// and Delivery::wait, which run signal handlers.
std::chrono::milliseconds left(Clock::time_point end);
void rest();
void waitFor(Delivery& delivery, int peer, Clock::time_point end);

// Held while a group is being made (Admission::expect). The endpoint outlives it.
class Expectation {
 public:
  Expectation(Endpoint& endpoint, const GroupId& group) : endpoint_(endpoint), group_(group) {
    endpoint_.withAdmission([&](Admission& admission) { admission.expect(group_); });
  }
  Expectation(const Expectation&) = delete;
  ~Expectation() {
    endpoint_.withAdmission([&](Admission& admission) { admission.expectNoMore(group_); });
  }

 private:
  Endpoint& endpoint_;
  const GroupId group_;
};

}  // namespace lowcomm::tcp

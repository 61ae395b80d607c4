#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/tcp/link.h"
#include "transport/tcp/pace.h"
#include "transport/tcp/pipe.h"
#include "transport/tcp/relay.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/strangers.h"

namespace lowcomm::tcp {

// Where an endpoint listens, and by which addresses others reach it.
struct EndpointOptions {
  std::string listen = "";     // "host:port"; empty: every interface, a port that the system picks
  std::string advertise = "";  // "host:port"; empty: the addresses of the machine with the port
  std::string interface = "";  // of the machine; empty: all
  std::string rate = "";       // Pace
  bool dials_only = false;     // nobody can reach it: it does not listen
  std::string relay = "";      // "host:port" of one; empty: a rank that can be reached
  bool relays_all = false;     // it is a relay for groups that it does not belong to
  std::optional<Secret> secret = {};

  // LOWCOMM_LISTEN and LOWCOMM_ADVERTISE, whose ports count from LOCAL_RANK where that is set; LOWCOMM_SOCKET_IFNAME,
  // else GLOO_SOCKET_IFNAME; LOWCOMM_RATE; LOWCOMM_DIAL_ONLY; LOWCOMM_RELAY; Secret::fromEnvironment(). ValueError
  // naming the variable.
  static EndpointOptions fromEnvironment();
};

// One listening port and one thread, which all groups of a process share. The thread does all reading and writing, by
// poll(): a process has some dozens of connections, and a loop of a page serves them as well as a library would.
//
// Messages leave in the order in which they were sent, whichever channel they go by, those of the control lane before
// others: the next is not begun before the kernel has taken the one before, or has not for too long (Link::patience).
// So ranks that send to each other in an order in which no two send to the same one keep to it, and links are shared by
// no more flows than need be (the kernel holds little unsent: connection.cpp).
//
// A connection from outside has to say a Hello of a group that is here within seconds (Strangers). With a secret, all
// connections are TLS, from here and from outside.
class Endpoint {
 public:
  // ValueError where it cannot listen, or where there is a secret and no TLS.
  explicit Endpoint(const EndpointOptions& options);
  ~Endpoint();

  // That of this process, which lives as long as anybody has it. Of the environment's options; ValueError where the
  // environment has come to have another secret meanwhile.
  static std::shared_ptr<Endpoint> shared();

  uint64_t incarnation() const { return incarnation_; }
  // The address of the relay that ranks of this process use; empty: another rank.
  const std::string& relay() const { return relay_address_; }

  // Connections that it joins, and the bytes that it has passed on between them.
  std::pair<size_t, uint64_t> relayed();

  // None of one that only dials.
  const std::vector<std::string>& addresses() const { return addresses_; }
  const std::shared_ptr<Tls>& tls() const { return tls_; }  // null: without a secret

  // A group is being made: a rank that dials for it too early gets no answer, where it would be told that there is no
  // such group.
  void expect(const GroupId& group);
  void expectNoMore(const GroupId& group);

  void add(const std::shared_ptr<Link>& link);

  // Serves a group whose peers are not known in advance: `admit` makes the link for a peer's first Hello of the group,
  // from the network `host` (empty: it has the secret), or null where there is no room. It is called on the endpoint's
  // thread, with the links' lock. ValueError where the group is served already. After serveNoMore() it is not called.
  using Admit = std::function<std::shared_ptr<Link>(const Hello&, const std::string& host)>;
  void serve(const GroupId& group, Admit admit);
  void serveNoMore(const GroupId& group);

  // The link's channel ends; nothing of it is touched afterwards. What it said last is still brought to the peer, also
  // where the endpoint is destroyed meanwhile, which then takes up to kStays. So do pairs that it relays.
  static constexpr std::chrono::seconds kStays{2};
  void remove(const std::shared_ptr<Link>& link);

  // The place of a message among all that leave this process. wake(): there is something to write.
  uint64_t takePlace() { return ++places_; }
  void wake();

  // Calls with the links' lock, while the thread rests.
  template <class F>
  auto locked(F&& f) {
    std::lock_guard lock(mutex_);
    return f();
  }

  // For tests: accepts no connections from now on, like an endpoint whose address has changed.
  void deafen();

  // For tests: closes every connection at once, as a network does that resets them.
  void cut();

 private:
  std::string listen(const EndpointOptions& options);
  void run();
  void turn();
  void failAll(const std::string& why);
  std::chrono::milliseconds writeAll();  // returns for how long nothing more can be done
  void acceptSome();
  using Introduction = Strangers::PendingHello::Introduction;
  void introduce(Introduction& one);
  bool mayBeRelayed(const Introduction& one) const;
  Link* linkTo(const GroupId& group, uint32_t from, uint32_t to, uint32_t channel) const;
  void halt();
  void seeOff();
  bool stays();

  Fd listener_, waker_;
  std::vector<std::string> addresses_;
  const uint64_t incarnation_;
  const std::shared_ptr<Tls> tls_;
  const std::string relay_address_;
  const bool relays_all_;
  Pace pace_;
  Relay relay_;
  std::atomic<bool> stop_{false}, awake_{false};
  std::atomic<uint64_t> places_{0};

  std::mutex mutex_;
  std::vector<std::shared_ptr<Link>> links_;
  std::vector<GroupId> expected_;
  std::optional<Strangers> strangers_;  // from when the port is known
  std::map<GroupId, Admit> served_;
  // A socket whose last bytes are on their way.
  struct Leaving {
    Fd fd;
    Clock::time_point deadline;
  };
  std::list<Leaving> leaving_;
  Clock::time_point accept_at_{}, tick_at_{}, stays_until_{};
  std::chrono::milliseconds patience_{0};  // of the next poll()
  std::thread thread_;
};

}  // namespace lowcomm::tcp

#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/link.h"
#include "transport/tcp/relay.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/secure.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/strangers.h"

namespace lowcomm::tcp {

// Where an endpoint listens, and by which addresses others reach it.
struct EndpointOptions {
  std::string listen = "";     // "host:port"; empty: every interface, a port that the system picks
  std::string advertise = "";  // "host:port"; empty: the addresses of the machine with the port
  std::string interface = "";  // of the machine; empty: all
  std::string rate = "";       // Pace
  bool dials_only = false;     // no rank can dial it: it does not listen
  std::string relay = "";      // "host:port" of one; empty: a rank that can be reached
  bool relays_all = false;     // it is a relay for groups that it does not belong to
  std::optional<Secret> secret = {};

  // LOWCOMM_LISTEN and LOWCOMM_ADVERTISE, whose ports count from LOCAL_RANK where that is set; LOWCOMM_SOCKET_IFNAME,
  // else the first of GLOO_SOCKET_IFNAME; LOWCOMM_RATE; LOWCOMM_DIAL_ONLY; LOWCOMM_RELAY; Secret::fromEnvironment().
  // ValueError naming the variable.
  static EndpointOptions fromEnvironment();
};

// The connections that others make to an endpoint: its listening port, and what becomes of a connection that is
// accepted there. It has to say a Hello within seconds (Strangers), and goes to the link of its channel; to the group
// that is served under the Hello's id, which makes a link for it; or to the relay, which joins it with another. All
// others are answered that there is no such group, or closed.
//
// Used by the endpoint's thread, or under its lock.
class Admission {
 public:
  // `links`: the endpoint's, which outlives this; links of served groups are added there. `tls`: null without a secret.
  // ValueError if it cannot listen.
  Admission(std::vector<std::shared_ptr<Link>>& links, const EndpointOptions& options, std::shared_ptr<Tls> tls,
            uint64_t incarnation);

  // None of an endpoint that only dials.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // A group is being made: a rank that dials for it too early gets no answer, where it would be told that there is no
  // such group.
  void expect(const GroupId& group) { expected_.push_back(group); }
  void expectNoMore(const GroupId& group) { std::erase(expected_, group); }

  // Serves a group whose peers are not known in advance: `admit` makes the link for a peer's first Hello of the group,
  // from the network `host` (empty: it has the secret), or null where there is no room. It is called on the endpoint's
  // thread, with the links' lock. ValueError where the group is served already. After serveNoMore() it is not called.
  using Admit = std::function<std::shared_ptr<Link>(const Hello&, const std::string& host)>;
  void serve(const GroupId& group, Admit admit);
  void serveNoMore(const GroupId& group) { served_.erase(group); }

  // Endpoint::relayed.
  std::pair<size_t, uint64_t> relayed() const { return {relay_.joined(), relay_.bytes()}; }

  // Appends what to wait for; ready() gets the same after poll(), and tick() is called now and then.
  void waitFor(std::vector<pollfd>& waits);
  void ready(std::span<const pollfd> waits);
  void tick();

  // Handles a connection to a relay as if the peer had made it to the port.
  void admitJoined(Fd fd) { strangers_->admit(std::move(fd), {}); }

  // Closes what has been accepted and not become a link's; accepts no more until `until`; gives up the port.
  void clear();
  void pauseUntil(Clock::time_point until) { accept_at_ = until; }
  void close() { listener_ = Fd(); }

 private:
  using Introduction = Strangers::PendingHello::Introduction;
  std::string listen(const EndpointOptions& options);
  void acceptSome();
  void introduce(Introduction& one);
  bool mayBeRelayed(const Introduction& one) const;
  Link* linkTo(const GroupId& group, uint32_t from, uint32_t to, uint32_t channel) const;

  std::vector<std::shared_ptr<Link>>& links_;
  const std::shared_ptr<Tls> tls_;
  const uint64_t incarnation_;
  const bool relays_all_;
  Fd listener_;
  std::vector<std::string> addresses_;
  Clock::time_point accept_at_{};
  std::optional<Strangers> strangers_;  // from when the port is known
  size_t strangers_waited_for_ = 0;     // by the last waitFor()
  Relay relay_;
  std::vector<GroupId> expected_;
  std::map<GroupId, Admit> served_;
};

}  // namespace lowcomm::tcp

#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/endpoint.h"
#include "transport/tcp/link.h"
#include "transport/tcp/socket.h"

namespace lowcomm::tcp {

using Addresses = std::vector<std::pair<std::string, Address>>;

// Whether an address, "host:port", is one of the ways to its process, which may lead over different networks: a number
// of IPv4, and no loopback.
bool isWay(const std::string& address);

// Two ranks whose control channel is connected, as one of them has them. `route` is that of the two. `offered`: the
// ways to this rank, if the other one dials; else 0.
struct Pair {
  Route& route;
  Link& control;
  size_t offered = 0;
};

// The pairs of this rank whose accepting rank has two ways or more find out by which messages travel fastest, once for
// every two processes, before `end`, which is of the group's making; both ranks of a pair take part.
//
// 1. The dialling ranks of all pairs connect by all ways at once, over channels for this alone. A way that does not
//    connect within a third of a second, some round trips and 20 ms for each pair counts as none.
// 2. If a pair has two ways or more then, the dialling rank times a message of 128 KiB over one after the other. A way
//    that takes more than 5 seconds counts as none. A rank times in one pair at a time, in the order of `pairs`, in
//    which no two ranks may wait for each other.
// 3. The dialling rank tells the other that it has decided, and puts the address that it takes first in the route: the
//    first way, unless another one is 1.5 times as fast, which a line in the log says.
//
// Throws the TransportError that a control channel fails with.
void takeFastestWays(Endpoint& endpoint, const std::vector<Pair>& pairs, Clock::time_point end);

}  // namespace lowcomm::tcp

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

// Two ranks whose control channel is connected find out by which of the accepting rank's ways messages travel fastest,
// once for every two processes; both call it where that rank has two or more, before `end`, which is of the group's
// making. The dialling rank connects by each way, over channels for this alone, and times a message of 128 KiB over
// each, one after the other; a way that does not connect within a third of a second and some round trips, or takes
// more than 5 seconds, counts as none. It then tells the other which it takes: the first, unless another one is 1.5
// times as fast.
//
// `route` is that of the two, `control` their control channel. Throws the TransportError that `control` fails with.

// The dialling rank's part: puts the chosen address first in the route, and logs a line if it was not.
void takeFastestWay(Endpoint& endpoint, Route& route, Link& control, Clock::time_point end);

// The accepting rank's part: receives what the other sends until that one has decided.
void offerWays(Endpoint& endpoint, const Route& route, size_t ways, Link& control, Clock::time_point end);

}  // namespace lowcomm::tcp

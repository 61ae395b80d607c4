#pragma once

#include <chrono>
#include <memory>

#include "transport/tcp/endpoint.h"
#include "transport/transport.h"

namespace lowcomm {

// Connects the ranks of a group by TCP: to every peer a channel for the control lane and `connections` for the bulk
// lane, of which a tag picks the one of its number modulo theirs. 0: one, or several where the peer is far and a
// single one would not fill the link (connectionsOver in transport/tcp/pace.h). Channels survive their connections: one
// that is cut is dialled again, and what was under way goes on from the byte that was received last
// (transport/tcp/message_stream.h).
//
// Returns once this rank has a connection for every channel. Throws TransportError, timed_out or closed, naming the
// first peer without and the addresses that were tried; ValueError where it cannot listen; what `rendezvous` throws.
// Keys of the rendezvous: "lowcomm/tcp/group", "lowcomm/tcp/<rank>".
std::unique_ptr<Transport> connectTcp(Rendezvous& rendezvous, int rank, int size, int connections,
                                      std::chrono::milliseconds timeout,
                                      std::shared_ptr<tcp::Endpoint> endpoint = tcp::Endpoint::shared());

}  // namespace lowcomm

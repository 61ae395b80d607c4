#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "transport/transport.h"
#include "wire/key_values.h"

namespace lowcomm {

// Ranks of a group that is being made compare their wire version and every option, before any connection between them
// exists. Returns the group's epoch, drawn by rank 0.
//
// Throws PeerError on every rank when two differ (the first field, both values, both ranks), when a rank could not join
// (a field "error"), or when one does not show up within `timeout`.
uint32_t handshake(Rendezvous& rendezvous, int rank, int size, const KeyValues& mine,
                   std::chrono::milliseconds timeout);

// Leaves word that this rank cannot join and why, so that its peers need not wait for it.
void refuseHandshake(Rendezvous& rendezvous, int rank, const std::string& why);

}  // namespace lowcomm

#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/transport.h"
#include "wire/key_values.h"

namespace lowcomm {

// The machine behind one link that this process runs on, as far as the kernel can tell: processes of one network
// namespace have one text, those of another namespace, machine or boot another one.
std::string thisHost();

// The ranks of a group that have met.
struct Handshake {
  uint32_t epoch;                  // drawn by rank 0
  std::vector<std::string> hosts;  // by rank
};

// Ranks of a group that is being made compare their wire version and every option, before any connection between them
// exists, and tell each other their hosts. `host` has no line ends.
//
// Throws PeerError on every rank when two differ (the first field, both values, both ranks), when a rank could not join
// (a field "error"), or when one does not show up within `timeout`.
Handshake handshake(Rendezvous& rendezvous, int rank, int size, const KeyValues& mine, const std::string& host,
                    std::chrono::milliseconds timeout);

// Leaves word that this rank cannot join and why, so that its peers need not wait for it.
void refuseHandshake(Rendezvous& rendezvous, int rank, const std::string& why);

}  // namespace lowcomm

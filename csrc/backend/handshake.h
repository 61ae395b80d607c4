#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "wire/key_values.h"

namespace lowcomm {

// Ranks of a group being made compare who they are through its store, before any connection between them exists: wire
// version and every option. Returns the group's epoch, drawn by rank 0.
//
// Throws PeerError on every rank when two differ (the first field, both values, both ranks), when a rank could not join
// (a field "error"), or when one does not show up within `timeout`.
uint32_t handshake(c10d::Store& store, int rank, int size, const KeyValues& mine, std::chrono::milliseconds timeout);

// Leaves word that this rank cannot join and why, so that its peers need not wait for it.
void refuseHands(c10d::Store& store, int rank, const std::string& why);

}  // namespace lowcomm

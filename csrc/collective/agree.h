#pragma once

#include "wire/key_values.h"

namespace lowcomm {

class OpContext;

// Ranks compare a set of named values over the control lane: a policy being changed, a layout being registered.
// Collective. Throws PeerRefused naming the first field that differs, both values and both ranks, on every rank (each
// compares with each); the group goes on. A rank that has a field "error" is named with it. PeerError as in
// runExchange.
void agree(OpContext& op, const KeyValues& mine);

}  // namespace lowcomm

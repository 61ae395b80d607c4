#include "engine/handshake.h"

#include "base/error.h"

namespace lowcomm {
namespace {

std::string keyOf(int rank) {
  return "lowcomm/hello/" + std::to_string(rank);
}
constexpr const char* kEpochKey = "lowcomm/epoch";

std::string fetch(Rendezvous& rendezvous, const std::string& key, int peer, std::chrono::milliseconds timeout) {
  try {
    rendezvous.wait(key, timeout);
    return rendezvous.get(key);
  } catch (const std::exception& error) {
    throw PeerError("lowcomm: making a group: rank " + std::to_string(peer) + " did not say hello within " +
                        std::to_string(timeout.count()) + " ms: " + error.what(),
                    peer);
  }
}

// Seconds since 1970: later incarnations of a group have larger numbers, so a message can say which frame is the older.
uint32_t drawEpoch() {
  return static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count());
}

}  // namespace

uint32_t handshake(Rendezvous& rendezvous, int rank, int size, const KeyValues& mine,
                   std::chrono::milliseconds timeout) {
  uint32_t epoch = drawEpoch();
  if (size == 1) return epoch;
  if (rank == 0) rendezvous.set(kEpochKey, std::to_string(epoch));
  rendezvous.set(keyOf(rank), mine.text());
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    try {
      expectSameFields(mine, rank, KeyValues::parse(fetch(rendezvous, keyOf(peer), peer, timeout)), peer);
    } catch (const WireError& error) {
      throw PeerError(std::string("lowcomm: making a group: ") + error.what(), peer);
    }
  }
  if (rank != 0) epoch = static_cast<uint32_t>(std::stoul(fetch(rendezvous, kEpochKey, 0, timeout)));
  return epoch;
}

void refuseHandshake(Rendezvous& rendezvous, int rank, const std::string& why) {
  rendezvous.set(keyOf(rank), KeyValues{{{"error", why}}}.text());
}

}  // namespace lowcomm

#include "backend/handshake.h"

#include <chrono>

#include "base/error.h"

namespace lowcomm {
namespace {

std::string keyOf(int rank) {
  return "lowcomm/hello/" + std::to_string(rank);
}
constexpr const char* kEpochKey = "lowcomm/epoch";

std::vector<uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string fetch(c10d::Store& store, const std::string& key, int peer, std::chrono::milliseconds timeout) {
  try {
    store.wait({key}, timeout);
    const std::vector<uint8_t> value = store.get(key);
    return {value.begin(), value.end()};
  } catch (const std::exception& error) {
    const std::string why(error.what());  // torch appends a stack, line by line
    throw PeerError("lowcomm: making a group: rank " + std::to_string(peer) + " did not say hello within " +
                        std::to_string(timeout.count()) + " ms: " + why.substr(0, why.find('\n')),
                    peer);
  }
}

// Seconds since 1970: later incarnations of a group have larger numbers, so a message can say which frame is the older.
uint32_t drawEpoch() {
  return static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count());
}

}  // namespace

uint32_t handshake(c10d::Store& store, int rank, int size, const KeyValues& mine, std::chrono::milliseconds timeout) {
  uint32_t epoch = drawEpoch();
  if (size == 1) return epoch;
  if (rank == 0) store.set(kEpochKey, bytes(std::to_string(epoch)));
  store.set(keyOf(rank), bytes(mine.text()));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    try {
      expectSameHello(mine, rank, KeyValues::parse(fetch(store, keyOf(peer), peer, timeout)), peer);
    } catch (const WireError& error) {
      throw PeerError(std::string("lowcomm: making a group: ") + error.what(), peer);
    }
  }
  if (rank != 0) epoch = static_cast<uint32_t>(std::stoul(fetch(store, kEpochKey, 0, timeout)));
  return epoch;
}

void refuseHands(c10d::Store& store, int rank, const std::string& why) {
  KeyValues hello;
  hello.fields = {{"error", why}};
  store.set(keyOf(rank), bytes(hello.text()));
}

}  // namespace lowcomm

#include "engine/handshake.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace lowcomm {
namespace {

std::string keyOf(int rank) {
  return "lowcomm/hello/" + std::to_string(rank);
}
constexpr const char* kEpochKey = "lowcomm/epoch";
constexpr std::string_view kHost = "host=";  // begins a hello's first line, which is compared with no other rank's

std::string fetch(Rendezvous& rendezvous, const std::string& key, int peer, std::chrono::milliseconds timeout) {
  try {
    return rendezvous.get(key, timeout);
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

// Takes the first line, the peer's host, off a hello; a rank that refuses says none.
std::string takeHost(std::string& hello) {
  if (hello.compare(0, kHost.size(), kHost) != 0) return "";
  const size_t end = std::min(hello.find('\n'), hello.size());
  std::string host = hello.substr(kHost.size(), end - kHost.size());
  hello.erase(0, end + 1);
  return host;
}

}  // namespace

// A machine's name and boot tell machines apart, as for NCCL; a namespace has network interfaces of its own.
std::string thisHost() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat network{};
  ::stat("/proc/self/ns/net", &network);
  return std::string(name) + " " + boot + " " + std::to_string(network.st_ino);
}

Handshake handshake(Rendezvous& rendezvous, int rank, int size, const KeyValues& mine, const std::string& host,
                    std::chrono::milliseconds timeout) {
  uint32_t epoch = drawEpoch();
  std::vector<std::string> hosts(size, host);
  if (rank == 0 && size > 1) rendezvous.set(kEpochKey, std::to_string(epoch));
  if (size > 1) rendezvous.set(keyOf(rank), std::string(kHost) + host + "\n" + mine.text());
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    try {
      std::string hello = fetch(rendezvous, keyOf(peer), peer, timeout);
      hosts[peer] = takeHost(hello);
      expectSameFields(mine, rank, KeyValues::parse(hello), peer);
    } catch (const WireError& error) {
      throw PeerError(std::string("lowcomm: making a group: ") + error.what(), peer);
    }
  }
  if (rank != 0) epoch = static_cast<uint32_t>(std::stoul(fetch(rendezvous, kEpochKey, 0, timeout)));
  return {epoch, std::move(hosts)};
}

void refuseHandshake(Rendezvous& rendezvous, int rank, const std::string& why) {
  rendezvous.set(keyOf(rank), KeyValues{{{"error", why}}}.text());
}

}  // namespace lowcomm

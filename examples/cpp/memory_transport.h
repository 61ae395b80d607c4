#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "transport/transport.h"

namespace lowcomm {

// Ranks as threads of one process: a hub hands out one Transport a rank. Sends rendezvous with receives as the TCP
// transport's do (a send is done when its receive has the bytes), so tests meet the same deadlocks and the same
// half-duplex.
class MemoryHub {
 public:
  explicit MemoryHub(int size);
  ~MemoryHub();

  std::unique_ptr<Transport> transport(int rank);

  // Faults. A killed rank's connections close; a stalled one's messages stay undelivered until it is resumed.
  void kill(int rank);
  void stall(int rank);
  void resume(int rank);

  // Called on every message at delivery with (from, to, lane, bytes as they will be received); may change them in
  // place.
  using Tamper = std::function<void(int from, int to, Lane lane, std::span<std::byte> bytes)>;
  void tamper(Tamper tamper);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace lowcomm

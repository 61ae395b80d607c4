#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "collective/buffer_pool.h"
#include "collective/op_context.h"
#include "collective/send_window.h"
#include "transport/transport.h"

namespace lowcomm {

// The options of a group. Epoch, chunk_bytes, connections and ring_from are agreed by its ranks.
struct GroupConfig {
  std::string group = "default";
  std::vector<int> global_ranks;               // by group rank; empty: not shown in messages
  uint32_t epoch = 0;                          // frames of another one are refused
  size_t chunk_bytes = 256 << 10;              // payload of a full frame
  int connections = 1;                         // to every peer, for bulk: frames take them in turn
  int ring_from = 0;                           // an all_gather of so many ranks goes around a ring; 0: none does
  std::chrono::milliseconds timeout{1800000};  // progress deadline
  size_t flight_record = 0;                    // ops that the flight record holds; each rank's own affair
  std::string flight_folder;                   // where it is written; empty: the system's for temporary files
};

// A group: shared by its ops.
struct GroupContext {
  GroupContext(Transport& transport, GroupConfig config);

  Transport& transport;
  const std::string name;
  const std::vector<int> global_ranks;  // by group rank; for messages
  const uint32_t epoch;
  const size_t chunk_bytes;  // payload bytes of a full frame
  const int connections;     // to every peer over the bulk lane: a transfer's tag, modulo this, picks one
  const int ring_from;
  std::atomic<std::chrono::milliseconds::rep> timeout_ms;  // progress deadline: no frame for this long is a fault
  BufferPool frames;
  std::vector<std::byte> accumulator, scaled;  // scratch of the worker's reductions, kept from op to op
  SendWindow window;                           // the worker's

  int rank() const { return transport.rank(); }
  int size() const { return transport.size(); }
  std::string rankName(int rank) const;  // "rank 1 (global 5)"
};

// A transfer with a peer failed, as against what came in it.
struct TransferError : PeerError {
  TransferError(const std::string& what, int peer, TransportError::Kind kind) : PeerError(what, peer), kind(kind) {}
  TransportError::Kind kind;
};

}  // namespace lowcomm

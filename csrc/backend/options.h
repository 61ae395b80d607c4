#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "codec/spec.h"
#include "transport/tcp/pace.h"

namespace lowcomm {

// An allow-list: which codec each op may use. Empty is exact.
//
// Text: "op=codec; op=codec", for example "all_gather=minmax8:bucket=1024; reduce_scatter=qsgd8".
class Policy {
 public:
  Policy() = default;

  // Throws ValueError naming the part that is wrong: no such op, an op this version does not compress, an op named
  // twice, a codec that CodecSpec::parse refuses or that needsTable.
  static Policy parse(std::string_view text);

  // Canonical text, ops in alphabetical order; parse(str()) is the same policy.
  std::string str() const;

  // The codec for an op ("all_gather", "p2p", "reduce_scatter"), or nothing: exact.
  std::optional<CodecSpec> codec(const std::string& op) const;

  bool empty() const { return codecs_.empty(); }

 private:
  std::map<std::string, CodecSpec> codecs_;
};

// Why a tensor of these sizes cannot be encoded with a policy's codec, or nothing where it can. It then goes exact, as
// everything does that a policy names but no codec takes.
std::optional<std::string> untaken(const CodecSpec& codec, std::span<const int64_t> sizes);

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// The settings of a group once everything is filled in; the same on all its ranks, except for what is said to be each
// rank's own affair.
struct Settings {
  Policy policy;
  uint64_t min_bytes = 65536;        // a rank's raw contribution under this stays exact
  uint64_t seed = 0;                 // of stochastic rounding
  uint64_t chunk_bytes = 256 << 10;  // payload of a full frame
  uint64_t connections = 0;          // to every peer, for bulk; 0: as many as it needs (connectTcp)
  uint64_t flight_record = 64;       // ops that the flight record holds; each rank's own affair
  bool encode_on_device = false;     // CUDA tensors that are coded are coded where they are; each rank's own affair
  // Whether NCCL serves exact ops of CUDA tensors. It has ports of its own, dials every rank, and ends the process
  // where a connection is lost.
  bool nccl = false;
  bool secret = false;  // whether the environment has one (secret.h)

  std::string connectionsText() const { return connections > 0 ? std::to_string(connections) : "auto"; }

  // How many connections frames take in turn, as far as there are so many.
  int turns() const { return connections > 0 ? static_cast<int>(connections) : tcp::kFarConnections; }
};

// Throws ValueError, in milliseconds: a progress deadline of 0 would be none to some and over at once to others.
void checkTimeout(std::chrono::milliseconds timeout);

// The options that a user passes as `pg_options`. Fields left unset are filled from the environment (LOWCOMM_POLICY,
// LOWCOMM_MIN_BYTES, LOWCOMM_SEED, LOWCOMM_CHUNK_BYTES, LOWCOMM_CONNECTIONS, LOWCOMM_FLIGHT_RECORD,
// LOWCOMM_ENCODE_ON_DEVICE, LOWCOMM_NCCL), then from the defaults of Settings; those of a group that
// is made next to or out of a living one from that one's settings first (inherit). Frozen once made; c10d hands the
// same object to every group, so a group copies it.
struct Options : c10d::Backend::Options {
  Options() : c10d::Backend::Options("lowcomm", kBackendDefaultTimeout) {}

  std::optional<std::string> policy;
  std::optional<int64_t> min_bytes;
  std::optional<int64_t> seed;
  std::optional<int64_t> chunk_bytes;
  std::optional<int64_t> connections;
  std::optional<int64_t> flight_record;
  std::optional<bool> encode_on_device;
  std::optional<bool> nccl;
  std::string name = "lowcomm";  // what the backend calls itself; "gloo" where it stands in gloo's place
  std::string of_group = {};     // the group that has them and filled them in; empty: a caller's
  bool timeout_set = false;      // whether the user gave `timeout`; otherwise it is init_process_group's

  // Torch 2.15 copies the options of a group with this to make a child group (it is virtual there).
  c10::intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }

  // Throws ValueError naming a field that the user gave and that is wrong, with expected and actual.
  void check() const;

  // Everything filled in. Throws ValueError as check(), of any timeout, or naming the environment variable; where there
  // is a secret also as applySecret() (secret.h).
  Settings resolve() const;

  // Fills what is unset from the settings of a living group.
  void inherit(const Settings& parent);

  std::string repr() const;
};

}  // namespace lowcomm

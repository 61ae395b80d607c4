#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "backend/group.h"
#include "codec/codec.h"
#include "codec/spec.h"

namespace lowcomm {

// lc.exact(): ops that a thread issues between enter() and leave() are not compressed. Scopes nest. leave() may be
// called on another thread (a generator that is closed elsewhere): it ends the scope of the thread that entered.
class ExactScope {
 public:
  void enter();
  void leave();

  // Whether the calling thread is inside a scope.
  static bool active();

 private:
  std::shared_ptr<std::atomic<bool>> open_;
};

// Why a tensor travels exact; empty where the policy does not name the op.
struct ReasonExact {
  std::string text;
};
using CodecChoice = std::variant<CodecSpec, ReasonExact>;

// Chooses the codec of each tensor of an op: the policy's, where the policy names the op and nothing speaks against it
// (lc.exact(), the dtype, fewer than min_bytes, a shape that the codec does not take). All ranks that hold tensors of
// one shape decide the same, and ranks compare the result before any element is sent. Thread-safe.
class CodecChooser {
 public:
  // `group` outlives this.
  explicit CodecChooser(Group& group) : group_(group) {}

  // Whether the policy names the op.
  bool names(const std::string& op) const { return group_.policyCodec(op).has_value(); }

  // The codec of one tensor of an op to which a rank contributes `raw_bytes`. With axis=channel the codec follows the
  // tensor's last dimension.
  CodecChoice choose(const std::string& op, const at::Tensor& tensor, uint64_t raw_bytes) const;

  // The same: `none` where it travels exact. That is counted, where the policy names the op, in the group's stats under
  // `counted_as`.
  CodecSpec codecOf(const std::string& op, const at::Tensor& tensor, uint64_t raw_bytes, const std::string& counted_as);
  CodecSpec codecOf(const std::string& op, const at::Tensor& tensor, uint64_t raw_bytes) {
    return codecOf(op, tensor, raw_bytes, op);
  }

  // The codec of each tensor of an op that contributes all of them.
  std::vector<CodecSpec> codecsOf(const std::string& op, const std::vector<at::Tensor>& tensors);

  // The codec of each part of a tensor of a collective, by the part's own shape: all ranks have all shapes if the parts
  // are a list. All parts are sent exact if one of them must be.
  std::vector<CodecSpec> codecsOfParts(const std::string& op, const std::vector<at::Tensor>& parts,
                                       uint64_t contribution);

  // Why the calling thread codes no tensor of the type now, whatever its size and shape; empty where it may.
  static ReasonExact reasonAgainst(at::ScalarType type);

 private:
  Group& group_;
};

// The numbers a stochastic codec draws by, for callers that keep count of tensors and steps themselves.
struct Counter {
  uint64_t slot =
      0;  // the tensor's number within the step; a layout uses one a segment, a reduce_scatter one a slice too
  uint32_t step = 0;
};

// Counts what a group's stochastic codecs draw by, so that no two encodes share their draws. Thread-safe.
class DrawCounter {
 public:
  // Ops under a policy draw from the slots below this, which no op has tensors and ranks enough to reach, layouts from
  // those above.
  static constexpr uint64_t kLayoutSlots = 1ull << 32;

  // Point-to-point messages draw in the steps from here on, one each; no op's sequence number comes so far.
  static constexpr uint32_t kP2pSteps = 1u << 31;

  // `group` outlives this.
  explicit DrawCounter(const Group& group) : group_(group) {}

  // The key of this group's random draws: the seed mixed with the group's name, so that no two groups of a rank share
  // them.
  uint64_t key() const;

  // This rank's draws in a step, from slot 0 on. They follow its rank in the world: groups of other ranks (the replicas
  // of HSDP) must not share them.
  Draws ofStep(uint32_t step) const;

  // Those of the next point-to-point message that is sent.
  Draws ofNextMessage() { return ofStep(kP2pSteps + messages_++ % kP2pSteps); }

  // Reserves `count` consecutive slots for layouts' draws and returns the first.
  uint64_t reserveSlots(uint64_t count) { return kLayoutSlots + slots_.fetch_add(count); }

 private:
  const Group& group_;
  std::atomic<uint64_t> slots_{0};
  std::atomic<uint32_t> messages_{0};
};

}  // namespace lowcomm

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/coalescing.h"
#include "backend/codec_chooser.h"
#include "backend/inner_work.h"
#include "backend/op_issuer.h"
#include "wire/key_values.h"

namespace lowcomm {

// Hands ops to the inner backend of their tensors: those without a schedule of lowcomm's own, and those that travel
// exact. They run on the calling thread, or on the engine's worker where ranks compare the op first or another such op
// is queued, for gloo numbers collectives by order of issue.
//
// Threads: one caller at a time, as any c10d backend.
class InnerOps {
 public:
  using Call = std::function<WorkPtr(c10d::Backend&)>;

  // An op for the inner backend of its first tensor.
  struct Op {
    c10d::OpType type;
    const char* name;
    Tensors tensors, outputs;
    std::optional<KeyValues> description = {};  // what all ranks compare before the inner backend is called
    std::function<void()> finish = {};          // once it has succeeded; may be empty
    bool collective = true;
    std::string detail = {};  // for errors
    // Set by issue():
    BackendPtr inner = {};
    uint64_t bytes = 0, sequence = 0;
  };

  // All of them outlive this.
  InnerOps(Group& group, InnerBackends& backends, const CodecChooser& codecs, Coalescing& blocks, OpIssuer& issuer);

  // Passes the op to the inner backend: now, or at the end of an open block. `call` keeps what it needs.
  // NotImplementedError if no inner backend takes its tensors.
  WorkPtr issue(Op op, Call call);

  // The fields that ranks compare for an op that the policy names and the inner backend carries, with `more` before the
  // codec; empty if the policy does not name it. Such ops are sparse tensors, or reductions and types for which lowcomm
  // has no loop. Without the comparison another rank could code the same op on lowcomm's lane and wait there alone.
  std::optional<KeyValues> describe(const std::string& op, const Tensors& tensors,
                                    const std::vector<std::pair<std::string, std::string>>& more = {}) const;

  // The account of an op. `progress`: its entry in the flight record, where it has one.
  InnerOpAccount accountOf(const std::string& name, uint64_t sequence, const std::string& detail,
                           std::shared_ptr<OpProgress> progress = nullptr) const;

  // Returns when all ops of the group have ended, those that the engine runs and those of a device's backend.
  void waitForAll();

 private:
  [[noreturn]] void refuse(const Op& op) const;
  WorkPtr serve(const Op& op, const Call& call);
  WorkPtr serveOnWorker(const Op& op, const Call& call);
  void runOnWorker(const Op& op, const Call& call, OpContext& context);

  Group& group_;
  InnerBackends& backends_;
  const CodecChooser& codecs_;
  Coalescing& blocks_;
  OpIssuer& issuer_;
  std::atomic<int> queued_{0};  // ops that wait for their turn on the worker
};

}  // namespace lowcomm

#pragma once

#include <cstdint>
#include <functional>
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

// Hands ops to the inner backend of their tensors: exact ops of CUDA tensors in a group with NCCL. What neither lowcomm
// nor an inner backend carries is refused here.
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
    bool collective = true;
    std::string detail = {};  // for errors
    // Set by issue():
    BackendPtr inner = {};
    uint64_t bytes = 0, sequence = 0;
  };

  // All of them outlive this.
  InnerOps(Group& group, InnerBackend& backend, const CodecChooser& codecs, Coalescing& blocks, OpIssuer& issuer);

  // Passes the op to the inner backend: now, or at the end of an open block. `call` keeps what it needs.
  // NotImplementedError if no inner backend takes its tensors.
  WorkPtr issue(Op op, Call call);

  // The fields that ranks compare for an op that the policy names and the inner backend carries, with `more` before the
  // codec; empty if the policy does not name it. Such ops are reductions and types for which lowcomm has no loop.
  // Without the comparison another rank could code the same op on lowcomm's lane and wait there alone.
  std::optional<KeyValues> describe(const std::string& op, const Tensors& tensors,
                                    const std::vector<std::pair<std::string, std::string>>& more = {}) const;

  // Returns when all ops of the group have ended, those that the engine runs and those of the inner backend.
  void waitForAll();

 private:
  [[noreturn]] void refuse(const Op& op) const;
  WorkPtr serve(const Op& op, const Call& call);
  InnerOpAccount accountOf(const Op& op) const;

  Group& group_;
  InnerBackend& backend_;
  const CodecChooser& codecs_;
  Coalescing& blocks_;
  OpIssuer& issuer_;
};

}  // namespace lowcomm

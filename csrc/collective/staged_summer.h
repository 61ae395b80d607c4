#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "collective/device_codec.h"
#include "collective/staged.h"
#include "collective/summer.h"

namespace lowcomm {

// Sums of elements on a device. Contributions are encoded there, and payloads that came are copied there and summed.
// In an all_reduce the codes of a sum are copied to the host behind its kernel, and are decoded on the device once it
// is known that nothing was refused: until then the own elements stay, because the host's codec would need them to tell
// the error.
class StagedSummer final : public Summer {
 public:
  StagedSummer(OpContext& op, DeviceCodec& device_codec, const SumElements& elements);

  void start(size_t k) override;
  void check(size_t k) override;
  void encode(size_t k, int peer, std::span<std::byte> payload) override { sources_[peer]->encode(k, payload); }
  void absorb(size_t k, const Payloads& payloads) override;
  void encodeSums(size_t k, std::span<std::byte> payload) override;
  void takeSums(int owner, size_t k, std::span<const std::byte> payload) override;
  void wait() override;

 private:
  // A run of the own slice with every rank's part of its sum, by rank.
  struct RunTerms {
    const Run* run;
    std::vector<StagedTerm> terms;
    Payloads payloads;  // on the host; this rank's own is empty
  };
  // The runs that are whole with frame k.
  struct Sum {
    size_t k;
    std::vector<RunTerms> runs;
    DeviceCodec::SlotPtr terms{nullptr, {nullptr}};  // null where there are no runs
    DeviceCodec::SlotPtr codes{nullptr, {nullptr}};  // of an all_reduce
  };

  Sum load(size_t k, const Payloads& payloads);
  void addUp(Sum& sum);
  void encodeAgain(Sum& sum);
  void finishFirst();
  void takeCodes(const Sum& sum);
  void encodeOnHost(const Sum& sum);
  void attribute(const RunTerms& whole) const;
  const void* input(const Run& run) const;
  std::byte* output(const Run& run) const;
  Draws drawsOf(const Run& run) const;

  OpContext& op_;
  DeviceCodec& device_codec_;
  const SumElements elements_;
  const MessagePlan& own_;                              // this rank's slice
  const int average_over_;                              // 0: a sum
  std::vector<std::unique_ptr<StagedSource>> sources_;  // by rank; null for this one
  IncomingParts incoming_;
  std::deque<Sum> sums_;                            // of kernels that may still be at it
  std::optional<StagedCheck> check_;                // of the own slice, where its sums are not encoded
  std::optional<SumCodes> codes_;                   // of an all_reduce
  std::vector<std::unique_ptr<StagedSink>> sinks_;  // of an all_reduce, by rank
};

}  // namespace lowcomm

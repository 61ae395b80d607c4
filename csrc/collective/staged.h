#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "collective/coded_sums.h"
#include "collective/device_codec.h"
#include "collective/plan.h"
#include "collective/source_sink.h"
#include "collective/summer.h"

namespace lowcomm {

class OpContext;

// A message that is encoded on a device: `start` enqueues the kernels of a frame's runs and one copy of their payloads,
// `encode` waits for it. A codec that cannot be cut makes its payload with the frame that has the first part.
class StagedSource final : public Source {
 public:
  StagedSource(DeviceCodec& device_codec, SourceElements elements)
      : device_codec_(device_codec), elements_(std::move(elements)) {}

  void start(size_t k) override;
  void encode(size_t k, std::span<std::byte> payload) override;  // starts the frame where nobody has

 private:
  // Payloads that begin in one frame, end to end.
  struct FrameInFlight {
    size_t k = 0;
    DeviceCodec::SlotPtr slot;
    std::vector<const Run*> runs;
  };
  const void* elementsOf(const Run& run) const;
  ScatterEntry entryOf(const Run& run) const;
  void settle(FrameInFlight& frame);
  void encodeOnHost(FrameInFlight& frame);

  DeviceCodec& device_codec_;
  const SourceElements elements_;
  std::deque<FrameInFlight> started_;
  DeviceCodec::SlotPtr open_{nullptr, {nullptr}};  // of a payload that goes on in later frames, where it ends the slot
};

// Frames whose decoding a device may still be at, for each message: while the host copies one into a slot, the device
// decodes the one before.
inline constexpr size_t kStagedFrames = 2;

// A message that is decoded on a device: each frame's payloads are copied there and their kernels enqueued; what was
// refused is found when the frame after next comes, or at the end.
class StagedSink final : public Sink {
 public:
  StagedSink(OpContext& op, DeviceCodec& device_codec, SinkElements elements)
      : op_(op), device_codec_(device_codec), elements_(elements) {}

  void take(size_t k, std::span<const std::byte> payload, int sender) override;
  void wait() override;

 private:
  struct FrameInFlight {
    int sender;
    DeviceCodec::SlotPtr slot;
    std::vector<const Run*> runs;
  };
  std::byte* elementsOf(const Run& run) const;
  void waitForFirst();
  void decodeOnHost(const FrameInFlight& taken);

  OpContext& op_;
  DeviceCodec& device_codec_;
  const SinkElements elements_;
  IncomingParts parts_;
  std::deque<FrameInFlight> taken_;
};

// Exact payloads have no kernel that looks at them: their padding is checked here. Throws WireError.
void expectPadded(const Run& run, DType dtype, std::span<const std::byte> payload);

// Elements on a device that stay with their owner and are not encoded, so that no codec looks at them: what
// Codec::expectTaken is on the host. They are encoded for the sake of the refused word alone; the payload stays there.
class StagedCheck {
 public:
  // Checks the plan's frames from `data` on; both must outlive this object. `of` ends the text of a NonFiniteError.
  StagedCheck(DeviceCodec& device_codec, const MessagePlan& plan, const void* data, std::string of)
      : device_codec_(device_codec), plan_(plan), data_(static_cast<const std::byte*>(data)), of_(std::move(of)) {}

  // Begins to look at frame k, and throws the NonFiniteError of one that was begun; each in order, at most two frames
  // under way. Nothing past the last frame.
  void start(size_t k);
  void finish(size_t k);

 private:
  struct FrameInFlight {
    DeviceCodec::SlotPtr slot;
    std::vector<const Run*> runs;
  };

  DeviceCodec& device_codec_;
  const MessagePlan& plan_;
  const std::byte* const data_;
  const std::string of_;
  std::deque<FrameInFlight> begun_;
};

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
  const ScatterEntry& entry(const Run& run) const { return elements_.entries[op_.rank()][run.segment]; }
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

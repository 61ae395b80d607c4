#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "collective/exchange.h"
#include "collective/plan.h"
#include "kernels/reduce.h"

namespace lowcomm {

class CodedSums;
class DeviceCodec;
class OpContext;
struct CodecSpec;
struct Reduction;

// One tensor that ranks reduce, cut into a slice a rank, which that rank owns. All of it lives as long as its summer.
struct SumElements {
  const RankPlans& slices;
  const ScatterEntries& entries;  // the elements of every segment of every slice
  DType dtype;
  Draws draws;  // an entry's slot is counted from here
  const Reduction& reduction;
  bool encoded_again;         // whether the owner's sums are encoded for all others: an all_reduce
  CodedSums* sums = nullptr;  // takes their codes, of all slices; entries without an output are not decoded
};

// The arithmetic of a reduction, and the codes around it: on the host, or on a device. Frames, bits and errors are the
// same, so that ranks with one and ranks with the other may take part in one op. Called by the phases of a reduction,
// in the order and with the errors that Phase says.
class Summer {
 public:
  virtual ~Summer() = default;

  // The slices: every rank sends every other the one that it owns (SendSlices). `absorb` sums the contributions to the
  // own slice in rank order, in fp32 where they are coded or narrower, and divides once for an average. The sums are in
  // the entries' outputs, or encoded, and then in the outputs as their codes decode.
  virtual void start(size_t k) = 0;
  virtual void check(size_t k) = 0;
  virtual void encode(size_t k, int peer, std::span<std::byte> payload) = 0;
  virtual void absorb(size_t k, const Payloads& payloads) = 0;

  // The sums of an all_reduce: the payload of frame k of the own slice's, once all contributions to it were absorbed,
  // and frame k of those of `owner`, which are decoded into the entries' outputs.
  virtual void encodeSums(size_t k, std::span<std::byte> payload) = 0;
  virtual void takeSums(int owner, size_t k, std::span<const std::byte> payload) = 0;

  // After the last frame: the outputs are there (on a device: enqueued), and no error is outstanding.
  virtual void wait() {}
};

// Makes a summer for elements in host memory, or where `device_codec` is. A device's are float32, float16 or bfloat16,
// without premultiplication, because own elements would have to be changed before they are summed, and without error
// feedback; the entries of a slice that is not encoded again are one piece of memory. Throws TypeError for a dtype and
// a kind that reduceSupports refuses; ValueError for residuals of a premultiplied sum or of exact elements that are
// encoded again, for codes of another kind than a sum that are, and on a device for error feedback or made elements.
std::unique_ptr<Summer> makeSummer(OpContext& op, DeviceCodec* device_codec, const SumElements& elements);

// A reduction in a group of one rank, in place: there is no peer, so nothing is encoded, and only rounding of the scale
// and of the residual loses anything. Throws the NonFiniteError that encoding would throw.
void reduceAlone(const ScatterEntry& entry, const CodecSpec& codec, DType dtype, const Reduction& reduction);

// The end of a NonFiniteError: "of the slice for rank 2".
std::string sliceFor(int rank);

// The first phase of every reduction: each rank sends every other the slice that it owns.
class SendSlices final : public Phase {
 public:
  SendSlices(const OpContext& op, const RankPlans& slices, Summer& summer);

  void start(size_t k) override { summer_.start(k); }
  void check(size_t k) override { summer_.check(k); }
  void encode(size_t k, int peer, std::span<std::byte> payload) override { summer_.encode(k, peer, payload); }
  void absorb(size_t k, const Payloads& payloads) override { summer_.absorb(k, payloads); }

 private:
  Summer& summer_;
};

// The second phase of a reduction whose sums travel: each rank sends those of its slice to all others, or to `root`
// alone.
class SendSums final : public Phase {
 public:
  SendSums(const OpContext& op, const RankPlans& slices, Summer& summer, std::optional<int> root = {});

  // A frame needs the shares of all its runs; a round in which this rank has no frame, those of the same round.
  size_t readyAfter(size_t k) const override { return 1 + (k < own_.frames.size() ? own_.wholeWith(k) : k); }

  void encode(size_t k, int /*peer*/, std::span<std::byte> payload) override { summer_.encodeSums(k, payload); }
  void absorb(size_t k, const Payloads& payloads) override;

 private:
  const int rank_;
  const MessagePlan& own_;
  Summer& summer_;
};

// Whether an exact tensor of so many bytes is reduced by every rank for itself (FORMAT.md, "Slices"): between two
// ranks, and where its bytes take less time than a second phase would.
bool travelsWhole(uint64_t bytes, int ranks);

// The only phase of such an all_reduce: every rank sends all of its elements to all others, and reduces them in rank
// order, to the bits that the owners of slices come to. Plan and data live as long as it. TypeError as makeSummer.
std::unique_ptr<Phase> sendWhole(OpContext& op, const MessagePlan& plan, void* data, const Reduction& reduction);

// The operation on the elements of all ranks.
struct Reduction {
  ReduceKind kind = ReduceKind::sum;
  bool average = false;  // divide by the number of ranks, once, after the sum
  double premultiply = 1.0;
  bool premultiplied = false;  // multiply every contribution by `premultiply` before it is encoded

  // "sum", "avg", "premul_sum", "max", ...: the description's field.
  const char* name() const {
    if (average) return "avg";
    return premultiplied ? "premul_sum" : reduceName(kind);
  }
};

}  // namespace lowcomm

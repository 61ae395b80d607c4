#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/spec.h"
#include "collective/plan.h"

namespace lowcomm {

// Where a collective's elements are when they are not in host memory. They are encoded where they are, and only codes
// are copied, through pinned host memory: to the host those that are sent, from it those that came.
//
// Everything that is done on the device goes into one queue in order, and nothing of it is waited for until its result
// is needed: so the device makes frame k + 1 while the host waits for frame k. A kernel cannot throw. What it refuses
// it marks in a word next to the payload, and the same elements, or the same payload, are then given to the host's
// codec, which throws the error with its position; where it does not, what it made stands.

// One contribution to a sum: a payload, or elements where `own` is not null. On the device.
struct StagedTerm {
  const void* payload = nullptr;
  const void* own = nullptr;
};

// A device's work on runs. Pointers are to its memory unless said otherwise; payloads and `workspace` are aligned
// to 64 bytes. Every call enqueues and returns. A `refused` word is made 1 where the host's codec would throw, and is
// never made 0; what was written is then without meaning.
class CodecKernels {
 public:
  virtual ~CodecKernels() = default;

  // Whether it has kernels for a codec (`none` too) and float32, float16 or bfloat16 elements.
  virtual bool takes(const CodecSpec& codec, DType dtype) const = 0;

  // Bytes of workspace that any of the calls below needs for this run, which takes() must accept.
  virtual size_t workspaceBytes(const Run& run, DType dtype) const = 0;

  // Between pinned host memory and the device, or on the device.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  virtual void clear(void* at, size_t bytes) = 0;

  // Codec::encode and decode of a whole run.
  virtual void encode(const Run& run, void* payload, const void* x, DType dtype, const Draws& draws, void* workspace,
                      uint32_t* refused) = 0;
  virtual void decode(const Run& run, void* y, DType dtype, const void* payload, void* workspace,
                      uint32_t* refused) = 0;

  // out = the sum of the terms in fp32 and in order, rounded to `dtype`, then divided by average_over where that is not
  // 0 (reduceFinish). out may be a term's own elements.
  virtual void sum(const Run& run, void* out, DType dtype, std::span<const StagedTerm> terms, int average_over,
                   void* workspace, uint32_t* refused) = 0;

  // The payload that FusedCodec::encodeSum makes of them. Not of `none`.
  virtual void encodeSum(const Run& run, void* payload, DType dtype, std::span<const StagedTerm> terms,
                         int average_over, const Draws& draws, void* workspace, uint32_t* refused) = 0;
};

// Memory on both sides of the queue that the kernels are enqueued in, and points in it. Memory is aligned to 64 bytes;
// the last owner of pinned memory drops it when no copy of it is under way, that of device memory at any time.
class CodecQueue {
 public:
  using Memory = std::shared_ptr<std::byte>;
  using Wait = std::function<void()>;

  virtual ~CodecQueue() = default;
  virtual Memory deviceMemory(size_t bytes) = 0;
  virtual Memory pinnedMemory(size_t bytes) = 0;

  // Marks the queue's end as it is now; calling the result waits for it.
  virtual Wait mark() = 0;
};

// A device for one op at a time: its queue, its kernels, and the buffers between the two sides, which are used again
// and again. One thread at a time. Errors of the device are std::exceptions of its own and end the group.
class DeviceCodec {
 public:
  // One buffer on each side, with the refused word behind what it holds. Used again only after what was enqueued with
  // it has passed.
  class Slot {
   public:
    std::byte* host() const { return pinned_.get(); }
    std::byte* device() const { return device_.get(); }
    size_t bytes() const { return bytes_; }
    uint32_t* word() const { return reinterpret_cast<uint32_t*>(device() + bytes_); }

   private:
    friend class DeviceCodec;
    CodecQueue::Memory pinned_, device_;
    size_t capacity_ = 0, bytes_ = 0;
    CodecQueue::Wait landing_;  // empty: nothing is under way
  };
  struct Return {
    DeviceCodec* device_codec;
    void operator()(Slot* slot) const { device_codec->idle_.emplace_back(slot); }
  };
  using SlotPtr = std::unique_ptr<Slot, Return>;

  // `slot_bytes`: what most payloads are no longer than.
  DeviceCodec(std::unique_ptr<CodecQueue> queue, std::unique_ptr<CodecKernels> kernels, size_t slot_bytes);
  ~DeviceCodec();  // waits for everything that was enqueued
  DeviceCodec(const DeviceCodec&) = delete;
  DeviceCodec& operator=(const DeviceCodec&) = delete;

  CodecKernels& kernels() { return *kernels_; }
  bool takes(const CodecSpec& codec, DType dtype) const { return kernels_->takes(codec, dtype); }

  // A slot for payloads of `bytes`, a multiple of 4. It goes back when it is dropped; the device codec outlives it.
  SlotPtr take(size_t bytes);

  // Workspace for kernels on this run; the queue's order lets all of them have the same.
  void* workspace(const Run& run, DType dtype);

  // Payloads that kernels make: `clear` before them, `fetch` brings all of the slot to the host, `report` the word
  // alone.
  void clear(Slot& slot);
  void fetch(Slot& slot);
  void report(Slot& slot);

  // Payloads that stand in slot.host(): to the device, the word made 0.
  void load(Slot& slot);

  // Waits for what was fetched or reported; whether something was refused.
  bool refused(Slot& slot);

  // For the host's codec, once something was refused: waits.
  std::vector<std::byte> toHost(const void* elements, size_t bytes);
  void toDevice(void* elements, std::span<const std::byte> from);

  // Payloads, and elements by the two functions above, that were copied so far; the words are not counted.
  uint64_t hostBytes() const { return to_host_; }
  uint64_t deviceBytes() const { return to_device_; }

 private:
  void wait(Slot& slot);

  const std::unique_ptr<CodecQueue> queue_;
  const std::unique_ptr<CodecKernels> kernels_;
  const size_t slot_bytes_;
  std::vector<std::unique_ptr<Slot>> idle_;
  CodecQueue::Memory workspace_;
  size_t workspace_bytes_ = 0;
  uint64_t to_host_ = 0, to_device_ = 0;
};

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "codec/float_codec.h"
#include "codec/fused.h"
#include "collective/device_codec.h"
#include "kernels/reduce.h"

namespace lowcomm::test {

// A device made of host memory, whose kernels are the host's codecs. It is as late as a device may be: what is enqueued
// is done when somebody waits for it, and not before. So who reads a payload that it has not waited for, or writes to a
// buffer that a copy is still to be made from, gets other bytes than the host's.
class LateDevice {
 public:
  static constexpr std::byte kNever{0xa5};  // what memory holds that nothing was written to

  LateDevice() : told(own_) {}
  explicit LateDevice(std::vector<std::string>& told) : told(told) {}

  // One that is never late.
  static std::shared_ptr<LateDevice> prompt() {
    auto device = std::make_shared<LateDevice>();
    device->prompt_ = true;
    return device;
  }

  void enqueue(std::string name, std::function<void()> work) {
    if (prompt_) return work();
    told.push_back(std::move(name));
    work_.push_back(std::move(work));
  }

  void wait(size_t until) {
    told.push_back("wait " + std::to_string(until));
    for (; done_ < until; ++done_)
      std::exchange(work_[done_], nullptr)();
  }

  size_t enqueued() const { return work_.size(); }

  // Kept until the device goes: work that comes late may still use it.
  CodecQueue::Memory memory(size_t bytes) {
    auto whole = std::make_shared<std::vector<std::byte>>(bytes + 64, kNever);
    memory_.push_back(whole);
    const size_t over = reinterpret_cast<uintptr_t>(whole->data()) % 64;
    return {whole, whole->data() + (over ? 64 - over : 0)};
  }

  // Orders as they were given: "encode 1024" (first element in the message), "wait 3" (for the first three of them).
  std::vector<std::string>& told;

 private:
  bool prompt_ = false;
  std::vector<std::string> own_;
  std::vector<std::function<void()>> work_;
  size_t done_ = 0;
  std::vector<std::shared_ptr<std::vector<std::byte>>> memory_;
};

class LateQueue final : public CodecQueue {
 public:
  explicit LateQueue(std::shared_ptr<LateDevice> device) : device_(std::move(device)) {}
  Memory deviceMemory(size_t bytes) override { return device_->memory(bytes); }
  Memory pinnedMemory(size_t bytes) override { return device_->memory(bytes); }
  Wait mark() override {
    return [device = device_, until = device_->enqueued()] { device->wait(until); };
  }

 private:
  const std::shared_ptr<LateDevice> device_;
};

class LateKernels final : public CodecKernels {
 public:
  explicit LateKernels(std::shared_ptr<LateDevice> device) : device_(std::move(device)) {}

  bool takes(const CodecSpec& codec, DType) const override { return !needsTable(codec); }
  size_t workspaceBytes(const Run& run, DType) const override { return run.count * sizeof(float); }

  void copy(void* to, const void* from, size_t bytes) override {
    device_->enqueue("copy " + std::to_string(bytes), [=] { std::memcpy(to, from, bytes); });
  }
  void clear(void* at, size_t bytes) override {
    device_->enqueue("clear", [=] { std::memset(at, 0, bytes); });
  }

  void encode(const Run& run, void* payload, const void* x, DType dtype, const Draws& draws, void*,
              uint32_t* refused) override {
    kernel("encode", run, refused,
           [=] { run.codec->encode(span(payload, run), x, dtype, run.offset, run.count, draws); });
  }

  void decode(const Run& run, void* y, DType dtype, const void* payload, void*, uint32_t* refused) override {
    kernel("decode", run, refused, [=] { run.codec->decode(y, dtype, span(payload, run), run.offset, run.count); });
  }

  void sum(const Run& run, void* out, DType dtype, std::span<const StagedTerm> terms, int average_over, void* workspace,
           uint32_t* refused) override {
    kernel("sum", run, refused, [=, terms = std::vector(terms.begin(), terms.end())] {
      auto* acc = static_cast<float*>(workspace);
      for (size_t i = 0; i < terms.size(); ++i) {
        const bool exact = run.codec->spec().id == CodecId::none;
        if (terms[i].own || exact) {
          const void* x = terms[i].own ? terms[i].own : terms[i].payload;
          i == 0 ? reduceAssign(acc, x, dtype, run.count) : reduceInto(acc, x, dtype, ReduceKind::sum, run.count);
        } else if (i == 0) {
          run.codec->decode(acc, DType::float32, span(terms[i].payload, run), run.offset, run.count);
        } else {
          run.codec->decodeAdd(acc, dtype, span(terms[i].payload, run), run.offset, run.count);
        }
      }
      reduceFinish(out, acc, dtype, run.count, average_over);
    });
  }

  void encodeSum(const Run& run, void* payload, DType dtype, std::span<const StagedTerm> terms, int average_over,
                 const Draws& draws, void* workspace, uint32_t* refused) override {
    kernel("sum", run, refused, [=, terms = std::vector(terms.begin(), terms.end())] {
      std::vector<Contribution> all;
      for (const StagedTerm& term : terms)
        all.push_back(term.own ? Contribution{{}, term.own} : Contribution{span(term.payload, run)});
      FusedCodec(run.codec).encodeSum(span(payload, run), workspace, dtype, all, average_over, run.offset, run.count,
                                      draws);
    });
  }

 private:
  static std::span<std::byte> span(void* at, const Run& run) { return {static_cast<std::byte*>(at), run.whole}; }
  static std::span<const std::byte> span(const void* at, const Run& run) {
    return {static_cast<const std::byte*>(at), run.whole};
  }

  // `work` has a copy of the run: as a real launch has.
  template <class F>
  void kernel(const std::string& name, const Run& run, uint32_t* refused, F work) {
    device_->enqueue(name + " " + std::to_string(run.at), [=] {
      try {
        work();
      } catch (const std::exception&) {
        *refused = 1;
      }
    });
  }

  const std::shared_ptr<LateDevice> device_;
};

// A device codec on a late device of its own, or one that the caller keeps to look at.
inline std::unique_ptr<DeviceCodec> lateDeviceCodec(
    size_t slot_bytes, std::shared_ptr<LateDevice> device = std::make_shared<LateDevice>()) {
  return std::make_unique<DeviceCodec>(std::make_unique<LateQueue>(device), std::make_unique<LateKernels>(device),
                                       slot_bytes);
}

}  // namespace lowcomm::test

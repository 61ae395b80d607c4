#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/coalescing.h"
#include "backend/codec_chooser.h"
#include "tensor/device_queue.h"
#include "tensor/op_buffers.h"
#include "wire/layout.h"

namespace lowcomm {

using MemoryRange = std::pair<const std::byte*, const std::byte*>;  // where it begins and ends

// The properties of an op that decide whether its elements can stay on their device.
struct StagingRequest {
  Tensors tensors;                // inputs and outputs
  std::vector<CodecSpec> codecs;  // of all of them
  std::string because = {};       // another reason against it

  void add(const Layout& layout);  // its segments' codecs
};

// Throws ValueError where the tensor's device captures a CUDA graph.
void expectNoCapture(const Group& group, const std::string& op, const at::Tensor& tensor);

// Issues the ops that lowcomm carries itself: finds the queue of their tensors' device, decides whether values or codes
// leave the device, and puts them into the engine's queue.
//
// Threads: one caller at a time, as any c10d backend.
class OpIssuer {
 public:
  // All of them outlive this.
  OpIssuer(Group& group, InnerBackend& inner, const CodecChooser& codecs, Coalescing& blocks);

  // Whether lowcomm's own schedules take this tensor: dense memory of the host, or of a device in a group without an
  // inner backend for it, or with a policy that names the op.
  bool takes(const std::string& op, const at::Tensor& tensor) const;

  // The queue of the tensor's device; null: on the host. ValueError where a CUDA graph is captured.
  DeviceQueue* queueOf(const std::string& op, const at::Tensor& tensor);

  // The device codec of an op, or null: its tensors are on the host (`queue` is null), or their values are copied
  // there, which is counted and, the first time for its reason, logged (INFO).
  std::shared_ptr<DeviceCodec> deviceCodecFor(const std::string& op, DeviceQueue* queue, const StagingRequest& staged);

  struct Op {
    c10d::OpType type;
    const char* name;
    uint64_t sequence;
    bool exact;
  };
  // Queues an op that was checked and numbered: now, or at the end of an open block. `buffers` say how it runs.
  WorkPtr submit(const Op& op, Tensors inputs, Tensors outputs, DeviceQueue* queue, std::shared_ptr<OpBuffers> buffers);

  // Queues an op of an object that keeps state between ops (engine/op_queue.h); it takes `sequences` sequence numbers
  // and is counted under `op`. `done` gets the core's own exceptions.
  void submitJob(const std::string& op, uint32_t sequences, Engine::Job job, Engine::Done done);

  // Queues a job under a number of the group's and blocks until it has ended; throws its error.
  void runAndWait(const std::string& op, uint64_t sequence, Engine::Job job);

 private:
  struct Queued {
    std::weak_ptr<OpBuffers> op;  // expired: it has ended
    std::vector<MemoryRange> written;
  };
  // Enqueues the op's copies from the device, unless an earlier op that has not ended writes what they read. They wait
  // for the caller's stream, on a stream of their own: earlier ops' copies to the device do not wait for it.
  void loadAhead(const std::shared_ptr<OpBuffers>& op, std::vector<MemoryRange> written, const DeviceQueue& queue);

  Group& group_;
  InnerBackend& inner_;
  const CodecChooser& codecs_;
  Coalescing& blocks_;
  std::map<c10::DeviceIndex, DeviceQueue> queues_, loads_;
  std::vector<Queued> queued_;  // ops of device tensors
};

}  // namespace lowcomm

#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "collective/context.h"
#include "collective/device_codec.h"
#include "tensor/device_queue.h"

namespace lowcomm {

// An own op between issue and completion: host memory the engine reads and writes, and what has to happen around it.
// Contiguous host tensors are used where they are; others are copied in when the op starts and out at its end, so that
// ops see each other's results however a tensor lies in memory. A device's go through pinned host copies on a side
// stream, or stay where they are, with a device codec.
struct OpBuffers {
  // The op itself, on the worker; what it moves lives in its closure or in `kept`.
  std::function<void(OpContext&)> run;

  // Called on the worker when the op has ended, before anybody is told; null where it succeeded. May be empty.
  std::function<void(std::exception_ptr)> ended;

  // Device tensors whose codes alone are copied use this codec; released when the op has ended, after waiting for the
  // device's pending work.
  std::shared_ptr<DeviceCodec> device_codec;

  // Marks what the caller's stream has enqueued until now, which the op's copies, or its device codec (null: none),
  // come after. The side stream is every op's, and those before this one may still be at it: it must not wait, until
  // load(), for what comes after them. Without a `queue` nothing happens.
  void enter(DeviceQueue* queue, std::shared_ptr<DeviceCodec> given = nullptr);

  // Where a collective finds the elements of an input or output: on the device with a device codec, else as below.
  const void* source(const at::Tensor& input, DeviceQueue* queue);
  void* target(const at::Tensor& output);
  void* sourceAndTarget(const at::Tensor& tensor, DeviceQueue* queue);

  // A host tensor that holds `input`'s elements contiguously from start() on, kept alive here.
  at::Tensor readable(const at::Tensor& input, DeviceQueue* queue);

  // A host tensor to write `output`'s elements to; copied back by finish() where it is not `output` itself.
  at::Tensor writable(const at::Tensor& output);

  // readable() for a tensor that is written too.
  at::Tensor inPlace(const at::Tensor& tensor, DeviceQueue* queue);

  // As sourceAndTarget(), of each of several contiguous tensors of one type and device: a device's are packed there,
  // and take one copy of all in either direction, not one a tensor.
  std::vector<void*> sourcesAndTargets(const std::vector<at::Tensor>& tensors, DeviceQueue* queue);

  // Enqueues what comes before the op on the queue's stream: a wait for the caller's, copies from the device. Once.
  void load(DeviceQueue* queue);

  // The device's tensors that load() copies from.
  std::vector<at::Tensor> reads() const;

  // Before the engine reads: load(), copies in are made, and those from the device have landed.
  void start(DeviceQueue* queue);

  // Adds the bytes that crossed between device and host for the op: payloads of a device codec, else values.
  void count(OpCounters& counters) const;

  // After the engine wrote: copies out. On a device the copies, and the work that a device codec has enqueued, have
  // completed when it returns: after an op has ended no stream has to be waited for, and its tensors' memory may be
  // released.
  void finish(DeviceQueue* queue);

  // Drops what the op held. If the op failed before it waited for its copies from the device, the allocator reuses the
  // memory that they read only when they have ended.
  void release();

  std::vector<at::Tensor> kept;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_in, copies_out;  // (to, from)
  struct Pack {
    at::Tensor host;  // flat: of all parts, one after the other
    std::vector<at::Tensor> parts;
  };
  std::vector<Pack> packs;
  DeviceQueue::Mark issued, landed;
  std::optional<c10::Stream> reading;  // on which copies from the device are enqueued that were not waited for
  std::exception_ptr failed;           // a load() ahead of start(), which throws it
  uint64_t to_host = 0;                // bytes of values
};

}  // namespace lowcomm

// What every op of lowcomm's own goes through: the queue of its tensors' device, and the engine's.
#include <ATen/ThreadLocalState.h>

#include <optional>

#include "backend/backend.h"
#include "backend/profiler_ranges.h"
#include "tensor/errors.h"
#include "tensor/op_buffers.h"
#include "tensor/python_state.h"

namespace lowcomm {

DeviceQueue& LowcommBackend::queueOf(c10::Device device) {
  auto found = queues_.find(device.index());
  if (found == queues_.end()) found = queues_.emplace(device.index(), DeviceQueue(device)).first;
  return found->second;
}

DeviceQueue* LowcommBackend::queueOf(const std::string& op, const at::Tensor& tensor) {
  expectNoCapture(op, tensor);
  return tensor.device().is_cpu() ? nullptr : &queueOf(tensor.device());
}

void LowcommBackend::expectNoCapture(const std::string& op, const at::Tensor& tensor) const {
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu() || !DeviceQueue::capturing(tensor.device()), "lowcomm: ", op, " on group ", groupName(),
      ": expected a stream that runs what it is given, got ", tensor.device(),
      "'s current one, which captures a CUDA graph: an op that the host takes part in cannot be captured");
}

WorkPtr LowcommBackend::submit(const OwnCall& op, Tensors inputs, Tensors outputs, DeviceQueue* queue,
                               std::shared_ptr<OpBuffers> buffers) {
  const std::string name = op.name;
  auto work = c10::make_intrusive<EngineWork>(rank_, op.type, profilerTitle(options_->name, name),
                                              EngineWork::Name{name, groupName(), op.sequence}, std::move(inputs),
                                              std::move(outputs), callbacks_, queue);
  const bool copies = queue || !buffers->copies_in.empty() || !buffers->copies_out.empty();
  NoPythonObjects guard;
  auto state = std::make_shared<at::ThreadLocalState>();
  const auto ranges = ProfilerRanges::ofCaller(name);
  Engine::Job job = [buffers, queue, state, copies, ranges](OpContext& context) {
    if (ranges) ranges->follow(context);
    if (queue) DeviceQueue::occupy(queue->device());
    {
      std::optional<at::ThreadLocalStateGuard> restored;
      if (copies) restored.emplace(*state);
      buffers->start(queue);
    }
    buffers->run(context);
    context.whole = true;
    if (copies) {
      at::ThreadLocalStateGuard restored(*state);
      buffers->finish(queue);
    }
    buffers->count(context.counters);
    buffers->device_codec.reset();
  };
  Engine::Done done = [this, work, buffers, name, ranges](std::exception_ptr error, const OpCounters& counters) {
    if (ranges) ranges->report();
    OpCounters moved = counters;
    if (error) moved.raw_bytes = 0;  // nothing was delivered; what was sent was sent
    stats_.moved(name, moved);
    if (buffers->ended) buffers->ended(error);
    buffers->run = {};
    buffers->device_codec.reset();
    buffers->kept.clear();
    buffers->copies_in.clear();
    buffers->copies_out.clear();
    buffers->packs.clear();
    work->complete(asTorchError(error));
  };
  const auto start = [op, name, work, job, done](LowcommBackend& backend) -> WorkPtr {
    backend.stats_.call(name, op.exact);
    backend.engine().submit(name, job, done, static_cast<uint32_t>(op.sequence));
    return work;
  };
  if (!block_) return start(*this);
  return putOff(
      op.type, op.sequence, [backend = living(op.name), start] { return start(*backend()); },
      [work, done](std::exception_ptr error) {
        if (!work->isCompleted()) done(error, {});
      });
}

void LowcommBackend::queueOwn(const std::string& op, uint32_t sequences, Engine::Job job, Engine::Done done) {
  expectLiving(op);
  const uint64_t first = takeNumbers(sequences);
  engine().submit(
      op, std::move(job),
      [this, op, done = std::move(done)](std::exception_ptr error, const OpCounters& counters) {
        OpCounters moved = counters;
        if (error) moved.raw_bytes = 0;
        if (counters.raw_bytes > 0) {  // agreements are no traffic of the user's
          stats_.call(op, /*exact=*/false);
          stats_.moved(op, moved);
        }
        done(error, counters);
      },
      static_cast<uint32_t>(first));
}

}  // namespace lowcomm

#include "backend/op_issuer.h"

#include <ATen/ThreadLocalState.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "backend/stats.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

bool dense(const at::Tensor& tensor, const c10::Device& device) {
  return tensor.device() == device && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Where the tensors' storages begin and end. Tensors that share memory through DLPack have different storages.
std::vector<MemoryRange> rangesOf(const Tensors& tensors) {
  std::vector<MemoryRange> ranges;
  for (const at::Tensor& tensor : tensors) {
    const auto* begin = static_cast<const std::byte*>(tensor.storage().data());
    ranges.emplace_back(begin, begin + tensor.storage().nbytes());
  }
  return ranges;
}

}  // namespace

void expectNoCapture(const Group& group, const std::string& op, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu() || !DeviceQueue::capturing(tensor.device()), "lowcomm: ", op, " on group ", group.name(),
      ": expected a stream that runs what it is given, got ", tensor.device(),
      "'s current one, which captures a CUDA graph: an op that the host takes part in cannot be captured");
}

OpIssuer::OpIssuer(Group& group, InnerBackend& inner, const CodecChooser& codecs, Coalescing& blocks)
    : group_(group), inner_(inner), codecs_(codecs), blocks_(blocks) {}

bool OpIssuer::takes(const std::string& op, const at::Tensor& tensor) const {
  if (tensor.layout() != at::kStrided || tensor.is_quantized()) return false;
  if (tensor.device().is_cpu()) return true;
  return tensor.device().is_cuda() && (codecs_.names(op) || !inner_.get());
}

DeviceQueue* OpIssuer::queueOf(const std::string& op, const at::Tensor& tensor) {
  expectNoCapture(group_, op, tensor);
  if (tensor.device().is_cpu()) return nullptr;
  return &queues_.try_emplace(tensor.device().index(), tensor.device()).first->second;
}

void StagingRequest::add(const Layout& layout) {
  for (const Segment& segment : layout.segments())
    codecs.push_back(segment.codec);
}

std::shared_ptr<DeviceCodec> OpIssuer::deviceCodecFor(const std::string& op, DeviceQueue* queue,
                                                      const StagingRequest& staged) {
  if (!queue) return nullptr;
  std::string because;
  std::unique_ptr<CodecKernels> kernels;
  if (!group_.settings().encode_on_device) {
    because = "encode_on_device=False";
  } else if (group_.size == 1) {
    because = "a group of one rank";
  } else if (!staged.because.empty()) {
    because = staged.because;
  } else if (!std::all_of(staged.tensors.begin(), staged.tensors.end(),
                          [&](const at::Tensor& tensor) { return dense(tensor, queue->device()); })) {
    because = "a tensor that is not contiguous on one device";
  } else {
    kernels = codecKernels(*queue, because);
  }
  for (const auto& tensor : staged.tensors) {
    for (const CodecSpec& codec : staged.codecs) {
      if (kernels && !kernels->takes(codec, wireType(tensor.scalar_type()))) {
        because = codec.str() + " of " + c10::toString(tensor.scalar_type());
        kernels.reset();
      }
    }
  }
  if (!kernels) {
    if (group_.stats.unstaged(op, because)) {
      LOG(INFO) << "lowcomm: group " << group_.name() << ": " << op
                << " copies the values of CUDA tensors to the host, not their codes: " << because;
    }
    return nullptr;
  }
  group_.stats.staged(op);
  return std::make_shared<DeviceCodec>(std::make_unique<DeviceCodecQueue>(*queue), std::move(kernels),
                                       group_.engine().group().chunk_bytes);
}

WorkPtr OpIssuer::submit(const Op& op, Tensors inputs, Tensors outputs, DeviceQueue* queue,
                         std::shared_ptr<OpBuffers> buffers) {
  const std::string name = op.name;
  const std::vector<MemoryRange> written = rangesOf(queue ? outputs : Tensors{});
  auto work = c10::make_intrusive<EngineWork>(group_.rank, op.type, profilerTitle(group_.options->name, name),
                                              EngineWork::Name{name, group_.name(), op.sequence, group_.sharedEngine()},
                                              std::move(inputs), std::move(outputs), group_.callbacks, queue);
  const bool copies = queue || !buffers->copies_in.empty() || !buffers->copies_out.empty();
  NoPythonObjects guard;
  auto state = std::make_shared<at::ThreadLocalState>();
  const auto ranges = ProfilerRanges::ofCaller(name);
  Engine::Job job = [buffers, queue, state, copies, ranges](OpContext& context) {
    if (ranges) ranges->follow(context);
    if (queue) DeviceQueue::occupy(queue->device());
    const auto copy = [&](void (OpBuffers::*part)(DeviceQueue*)) {
      std::optional<at::ThreadLocalStateGuard> restored;
      if (copies) restored.emplace(*state);
      (buffers.get()->*part)(queue);
    };
    copy(&OpBuffers::start);
    buffers->run(context);
    context.whole = true;
    copy(&OpBuffers::finish);
    buffers->count(context.counters);
    buffers->device_codec.reset();
  };
  Engine::Done done = [this, work, buffers, name, ranges](std::exception_ptr error, const OpCounters& counters) {
    if (ranges) ranges->report();
    OpCounters moved = counters;
    if (error) moved.raw_bytes = 0;  // nothing was delivered; what was sent was sent
    group_.stats.moved(name, moved);
    if (buffers->ended) buffers->ended(error);
    buffers->release();
    work->complete(asTorchError(error));
  };
  const auto start = [=, this]() -> WorkPtr {
    group_.stats.call(name, op.exact);
    if (queue) {
      at::ThreadLocalStateGuard restored(*state);
      loadAhead(buffers, written, *queue);
    }
    group_.engine().submit(name, job, done, static_cast<uint32_t>(op.sequence));
    return work;
  };
  if (!blocks_.open()) return start();
  return blocks_.putOff(
      op.type, op.sequence,
      [living = group_.living(op.name), start] {
        const BackendPtr held = living();
        return start();
      },
      [work, done](std::exception_ptr error) {
        if (!work->isCompleted()) done(error, {});
      });
}

void OpIssuer::loadAhead(const std::shared_ptr<OpBuffers>& op, std::vector<MemoryRange> written,
                         const DeviceQueue& queue) {
  std::erase_if(queued_, [](const Queued& earlier) { return earlier.op.expired(); });
  const std::vector<MemoryRange> read = rangesOf(op->device_codec ? Tensors{} : op->reads());
  bool now = !read.empty();
  for (const auto& [begin, end] : read)
    for (const Queued& earlier : queued_)
      for (const auto& [other_begin, other_end] : earlier.written)
        now = now && (end <= other_begin || other_end <= begin);
  queued_.push_back({op, std::move(written)});
  try {
    if (now) op->load(&loads_.try_emplace(queue.device().index(), queue.device()).first->second);
  } catch (...) {
    op->failed = std::current_exception();  // start() throws it, where the peers are told
  }
}

void OpIssuer::submitJob(const std::string& op, uint32_t sequences, Engine::Job job, Engine::Done done) {
  group_.expectLiving(op);
  const uint64_t first = blocks_.takeNumbers(sequences);
  group_.engine().submit(
      op, std::move(job),
      [this, op, done = std::move(done)](std::exception_ptr error, const OpCounters& counters) {
        OpCounters moved = counters;
        if (error) moved.raw_bytes = 0;
        if (counters.raw_bytes > 0) {  // agreements are no traffic of the user's
          group_.stats.call(op, counters.exact);
          group_.stats.moved(op, moved);
        }
        done(error, counters);
      },
      static_cast<uint32_t>(first));
}

void OpIssuer::runAndWait(const std::string& op, uint64_t sequence, Engine::Job job) {
  auto work = c10::make_intrusive<EngineWork>(group_.rank, c10d::OpType::UNKNOWN, nullptr,
                                              EngineWork::Name{op, group_.name(), sequence, group_.sharedEngine()},
                                              Tensors{}, Tensors{}, group_.callbacks);
  group_.engine().submit(
      op, std::move(job), [work](std::exception_ptr error, const OpCounters&) { work->complete(asTorchError(error)); },
      static_cast<uint32_t>(sequence));
  work->wait(kNoTimeout);
}

}  // namespace lowcomm

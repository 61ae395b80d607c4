#include "backend/collectives.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>

#include <atomic>
#include <tuple>

#include "backend/stats.h"
#include "messages/p2p.h"
#include "tensor/errors.h"
#include "tensor/op_buffers.h"
#include "tensor/python_state.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

constexpr const char* kPolicyKey = "p2p";

// Whether what is decoded of a row depends on other rows.
bool tiesTokens(const CodecSpec& codec, int64_t width) {
  return tiesAll(codec) || (isGrid(codec.id) && width % codec.bucket != 0);
}

}  // namespace

// A message of lowcomm's own from the call to its Work. The engine first: frames go back to its pool.
struct PointToPoint::P2pRequest {
  std::shared_ptr<Engine> engine;
  const c10d::OpType type;
  const at::Tensor tensor;
  const CodecSpec codec;
  const int peer;
  const uint32_t tag;
  // A send's buffers, between prepare() and post().
  std::shared_ptr<OpBuffers> buffers = {};
  const void* input = nullptr;
  Draws draws = {};
  // A receive's sender, negative until it is known; null for a send.
  std::shared_ptr<std::atomic<int>> source = {};

  bool exact() const { return codec.id == CodecId::none; }
  bool sends() const { return type == c10d::OpType::SEND; }
  const char* name() const { return sends() ? "send" : "recv"; }
  MessageKey key() const { return {{MessageFlow::Kind::tag, tag}}; }
  MessagePlan plan() const {
    const WireElements elements(tensor);
    return planP2p(elements.count, codec, elements.dtype, engine->group().chunk_bytes);
  }
};

// A message between its issue and its end. Destroyed from the last to the first: the engine goes after the
// frames.
struct PointToPoint::P2pInFlight {
  std::shared_ptr<P2pRequest> request;
  std::shared_ptr<AnyRecv> any;         // null where the peer is named
  std::shared_ptr<P2pMessage> message;  // else null until it is known
  std::shared_ptr<OpBuffers> buffers;
  std::shared_ptr<DeviceQueue> queue;
  std::shared_ptr<ProfilerRanges> ranges;  // null where no profiler runs
  at::ThreadLocalState state;              // the caller's: copies out keep its inference mode
};

void PointToPoint::checkPeer(const char* name, int peer) const {
  TORCH_CHECK_VALUE(peer >= 0 && peer < parts_.group.size && peer != parts_.group.rank, "lowcomm: ", name,
                    ": expected a peer among the group's ranks 0...", parts_.group.size - 1, " other than this one, ",
                    parts_.group.rank, ", got ", peer);
}

// Refuses a message that the inner backend would refuse, or take for a fault of the peer, once other ops of a block are
// under way.
void PointToPoint::checkExact(c10d::OpType op, const Tensors& tensors, int peer, int tag) const {
  const char* name = op == c10d::OpType::SEND ? "send" : "recv";
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].defined(), "lowcomm: ", name, ": expected one tensor, got ",
                    tensors.size());
  const at::Tensor& tensor = tensors[0];
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "lowcomm: ", name, ": expected a dense tensor, got layout ",
                   tensor.layout());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "lowcomm: ", name,
                    " of an exact message: expected a contiguous tensor, got shape ", tensor.sizes(), " with strides ",
                    tensor.strides());
  if (op != c10d::OpType::RECVANYSOURCE && tensor.device().is_cpu()) checkPeer(name, peer);
  TORCH_CHECK_VALUE(tag >= 0, "lowcomm: ", name, ": expected a tag of 0 or more, got ", tag);
}

// The op as a message of lowcomm's own, encoded or exact, or null where the inner backend serves it.
std::shared_ptr<PointToPoint::P2pRequest> PointToPoint::requestOf(c10d::OpType type, const Tensors& tensors, int peer,
                                                                  int tag) {
  const char* name = type == c10d::OpType::SEND ? "send" : "recv";
  const bool named = parts_.codecs.names(kPolicyKey), any = type == c10d::OpType::RECVANYSOURCE;
  parts_.group.expectLiving(name);
  if (!named) {
    checkExact(type, tensors, peer, tag);
    if (!parts_.issuer.takes(kPolicyKey, tensors[0])) return nullptr;
  }
  const char* why = named ? " under a policy that names p2p" : "";
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].defined() && parts_.issuer.takes(kPolicyKey, tensors[0]),
                    "lowcomm: ", name, why, ": expected one dense tensor, got ", tensors.size(),
                    tensors.size() == 1 ? " of another layout" : "");
  if (!any) checkPeer(name, peer);
  TORCH_CHECK_VALUE(tag >= 0 && static_cast<uint32_t>(tag) < kP2pTags, "lowcomm: ", name, why,
                    ": expected a tag of 0...", kP2pTags - 1, ", got ", tag);
  if (type != c10d::OpType::SEND) checkOutput(name, tensors[0]);
  const CodecSpec codec = parts_.codecs.codecOf(kPolicyKey, tensors[0], tensors[0].nbytes(), name);
  std::shared_ptr<P2pRequest> request(
      new P2pRequest{parts_.group.sharedEngine(), type, tensors[0], codec, peer, static_cast<uint32_t>(tag)});
  if (request->sends() && tensors[0].dim() == 3 && tiesTokens(codec, tensors[0].size(2)) &&
      parts_.group.stats.withoutUnits(name)) {
    TORCH_WARN("lowcomm: ", name, " under the policy p2p=", codec.str(),
               ": a token of a tensor [batch, time, width], here ", tensors[0].sizes(),
               ", is coded together with later ones, which a causal model learns to read: use ",
               "lc.pipeline.Stage or Edge, or a codec whose bucket divides the width");
  }
  if (!request->sends()) request->source = std::make_shared<std::atomic<int>>(peer);
  return request;
}

// Starts the part of a send that can run before anything is posted: copies of values from a device.
void PointToPoint::prepare(P2pRequest& message) {
  if (!message.sends() || message.buffers) return;
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = parts_.issuer.queueOf(message.name(), message.tensor);
  buffers->enter(queue, message.exact()
                            ? nullptr
                            : parts_.issuer.deviceCodecFor(message.name(), queue, {{message.tensor}, {message.codec}}));
  message.input = buffers->source(message.tensor, queue);
  if (!buffers->device_codec) buffers->load(queue);
  message.draws = parts_.draws.ofNextMessage();
  message.buffers = std::move(buffers);  // last: what failed before is tried again
}

WorkPtr PointToPoint::post(const std::shared_ptr<P2pRequest>& request) {
  parts_.group.expectLiving(request->name());
  prepare(*request);
  auto buffers = std::make_shared<OpBuffers>();
  std::shared_ptr<DeviceQueue> queue;
  Engine& engine = *request->engine;
  const WireElements elements(request->tensor);
  std::shared_ptr<P2pMessage> message;
  std::shared_ptr<P2pSend> sent;
  std::shared_ptr<P2pRecv> received;
  std::shared_ptr<AnyRecv> any;
  std::unique_ptr<Source> source;
  std::unique_ptr<Sink> sink;
  const auto ranges = ProfilerRanges::ofCaller(request->name());
  if (request->sends()) {
    request->buffers->start(parts_.issuer.queueOf(request->name(), request->tensor));
    sent = std::make_shared<P2pSend>(engine.group(), request->peer, request->key(), request->plan(), elements.type_name,
                                     elements.type_elements);
    source = makeSource(sent->op, request->buffers->device_codec.get(), {sent->plan, request->input, request->draws});
    message = sent;
  } else {
    if (const DeviceQueue* shared = parts_.issuer.queueOf(request->name(), request->tensor))
      queue = std::make_shared<DeviceQueue>(*shared);
    buffers->enter(queue.get(), request->exact() ? nullptr
                                                 : parts_.issuer.deviceCodecFor(request->name(), queue.get(),
                                                                                {{request->tensor}, {request->codec}}));
    const auto receiveFrom = [&group = engine.group(), key = request->key(), plan = request->plan(), elements,
                              device_codec = buffers->device_codec, source = request->source,
                              target = buffers->target(request->tensor)](int peer) {
      auto message = std::make_shared<P2pRecv>(group, peer, key, plan, elements.type_name, elements.type_elements);
      auto sink = makeSink(message->op, device_codec.get(), {message->plan, target});
      *source = peer;
      return std::pair(std::move(message), std::move(sink));
    };
    if (request->peer < 0) {
      any = std::make_shared<AnyRecv>(engine.group(), request->key().flow, receiveFrom);
    } else {
      std::tie(received, sink) = receiveFrom(request->peer);
      message = received;
    }
  }
  OpContext& op = any ? any->op : message->op;
  if (ranges) ranges->follow(op);
  const auto part = [&] {
    if (any) return engine.messages().recvAny(any);
    sent ? engine.messages().send(sent, std::move(source)) : engine.messages().recv(received, std::move(sink));
  };
  if (auto error = engine.runInline(op, part)) std::rethrow_exception(asTorchError(error));
  if (request->buffers) request->buffers->count(op.counters);
  request->buffers.reset();  // it is encoded
  parts_.group.stats.call(request->name(), request->exact());
  parts_.group.stats.moved(request->name(), op.counters);

  NoPythonObjects guard;
  const std::shared_ptr<P2pInFlight> flight(
      new P2pInFlight{request, any, message, buffers, queue, ranges, at::ThreadLocalState()});
  // `this` is used in runInline() alone: the group's end waits for what runs there, and nothing does afterwards.
  const auto finish = [this, flight] {
    Engine& engine = *flight->request->engine;
    std::exception_ptr error;
    if (flight->any) error = engine.runInline(flight->any->op, [&] { flight->message = flight->any->wait(); });
    if (!error) error = engine.runInline(flight->message->op, [&] { this->finish(*flight); });
    if (flight->ranges) flight->ranges->report();
    return asTorchError(error);
  };
  const char* title = request->type == c10d::OpType::RECVANYSOURCE ? "recvAnySource" : request->name();  // as torch's
  return c10::make_intrusive<MessageWork>(
      parts_.group.rank, request->type, profilerTitle(parts_.group.options->name, title),
      EngineWork::Name{request->name(), parts_.group.name(), op.sequence, request->engine}, Tensors{request->tensor},
      request->source, parts_.group.callbacks, queue, finish);
}

void PointToPoint::finish(P2pInFlight& flight) {
  struct Count {
    Stats& stats;
    const P2pInFlight& flight;
    ~Count() {
      OpCounters later;  // the rest was counted when it was posted, where it was
      later.wait = flight.message->op.counters.wait;
      later.decode = flight.message->op.counters.decode;
      later.wait_by_peer = flight.message->op.counters.wait_by_peer;
      if (flight.any) {
        later.wire_bytes = flight.message->op.counters.wire_bytes;
        later.wait += flight.any->op.counters.wait;
      }
      flight.buffers->count(later);
      flight.buffers->device_codec.reset();
      stats.moved(flight.request->name(), later);
    }
  } count{parts_.group.stats, flight};
  flight.buffers->start(flight.queue.get());
  flight.request->engine->messages().finish(*flight.message);
  flight.message->op.whole = true;
  if (flight.buffers->copies_out.empty() && !flight.buffers->device_codec) return;
  at::ThreadLocalStateGuard restored(flight.state);
  flight.buffers->finish(flight.queue.get());
}

WorkPtr PointToPoint::exactOrCoded(c10d::OpType op, const Tensors& tensors, int peer, int tag, Exact call) {
  const bool receive = op != c10d::OpType::SEND;
  const char* name = receive ? "recv" : "send";
  const auto living = parts_.group.living(name);
  if (auto message = requestOf(op, tensors, peer, tag)) {
    const auto prepareFirst = [this, living, message] {
      const BackendPtr held = living();
      prepare(*message);
    };
    return parts_.blocks.putOffMessage(op, {receive, /*device=*/false, prepareFirst}, [this, living, message] {
      const BackendPtr held = living();
      return post(message);
    });
  }
  checkExact(op, tensors, peer, tag);
  InnerOps::Op inner{op, name, tensors, receive ? tensors : Tensors{}};
  inner.collective = false;
  inner.detail = ", peer rank " + (peer < 0 ? std::string("any") : std::to_string(peer));
  return parts_.blocks.putOffMessage(op, {receive, /*device=*/true}, [this, living, inner, call = std::move(call)] {
    const BackendPtr held = living();
    return parts_.inner.issue(
        inner, [used = Tensors(inner.tensors), call](c10d::Backend& backend) mutable { return call(backend, used); });
  });
}

WorkPtr PointToPoint::send(Tensors& tensors, int to, int tag) {
  return exactOrCoded(c10d::OpType::SEND, tensors, to, tag,
                      [to, tag](c10d::Backend& inner, Tensors& used) { return inner.send(used, to, tag); });
}

WorkPtr PointToPoint::recv(Tensors& tensors, int from, int tag) {
  return exactOrCoded(c10d::OpType::RECV, tensors, from, tag,
                      [from, tag](c10d::Backend& inner, Tensors& used) { return inner.recv(used, from, tag); });
}

WorkPtr PointToPoint::recvAnysource(Tensors& tensors, int tag) {
  return exactOrCoded(c10d::OpType::RECVANYSOURCE, tensors, -1, tag,
                      [tag](c10d::Backend& inner, Tensors& used) { return inner.recvAnysource(used, tag); });
}

}  // namespace lowcomm

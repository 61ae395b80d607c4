#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective_cases.h"
#include "messages/p2p.h"
#include "ranks_on_threads.h"
#include "side_by_side.h"

namespace lowcomm::test {

using MessagePtr = std::shared_ptr<P2pMessage>;

inline MessageKey tagged(uint32_t tag) {
  return {{MessageFlow::Kind::tag, tag}};
}

// A tensor and what its bytes become.
struct Tensor {
  Bytes data;
  uint64_t elements;
  DType dtype = DType::float32;
  std::string codec = "sym4:bucket=1024";
  Draws draws = {};

  static Tensor random(uint64_t elements, uint32_t seed, const std::string& codec = "sym4:bucket=1024",
                       DType dtype = DType::float32) {
    return {randomTensor(dtype, elements, seed), elements, dtype, codec, {7, streamOf(3, 0), seed}};
  }
  Tensor empty() const {
    Tensor out = *this;
    out.data.assign(data.size(), std::byte{0x77});
    return out;
  }
  MessagePlan plan(Engine& engine) const {
    return planP2p(elements, CodecSpec::parse(codec), dtype, engine.group().chunk_bytes);
  }
  Bytes received() const { return asDecoded(single(elements, codec), dtype, data, draws); }
};

// A message that was posted, and what posting it came to.
struct PostedReceive {
  MessagePtr message;
  Outcome outcome;
};

inline PostedReceive postSend(Engine& engine, const Tensor& tensor, int peer, uint32_t tag = 0,
                              DeviceCodec* device_codec = nullptr) {
  const auto message = std::make_shared<P2pSend>(engine.group(), peer, tagged(tag), tensor.plan(engine));
  auto source = makeSource(message->op, device_codec, {message->plan, tensor.data.data(), tensor.draws});
  const auto error = engine.runInline(message->op, [&] { engine.messages().send(message, std::move(source)); });
  return {message, Outcome(error, message->op.counters)};
}

inline PostedReceive postRecv(Engine& engine, Tensor& into, int peer, uint32_t tag = 0,
                              DeviceCodec* device_codec = nullptr) {
  const auto message = std::make_shared<P2pRecv>(engine.group(), peer, tagged(tag), into.plan(engine));
  auto sink = makeSink(message->op, device_codec, {message->plan, into.data.data()});
  const auto error = engine.runInline(message->op, [&] { engine.messages().recv(message, std::move(sink)); });
  return {message, Outcome(error, message->op.counters)};
}

inline MessagePtr sending(Engine& engine, const Tensor& tensor, int peer, uint32_t tag = 0) {
  const PostedReceive posted = postSend(engine, tensor, peer, tag);
  EXPECT_TRUE(posted.outcome.ok()) << posted.outcome.what();
  return posted.message;
}

inline MessagePtr receiving(Engine& engine, Tensor& into, int peer, uint32_t tag = 0) {
  const PostedReceive posted = postRecv(engine, into, peer, tag);
  EXPECT_TRUE(posted.outcome.ok()) << posted.outcome.what();
  return posted.message;
}

inline std::shared_ptr<AnyRecv> receivingFromAny(Engine& engine, Tensor& into, uint32_t tag = 0) {
  const auto recv = std::make_shared<AnyRecv>(engine.group(), tagged(tag).flow, [&engine, &into, tag](int peer) {
    auto message = std::make_shared<P2pRecv>(engine.group(), peer, tagged(tag), into.plan(engine));
    auto sink = makeSink(message->op, nullptr, {message->plan, into.data.data()});
    return std::pair(std::move(message), std::move(sink));
  });
  const auto error = engine.runInline(recv->op, [&] { engine.messages().recvAny(recv); });
  EXPECT_FALSE(error);
  return recv;
}

inline Outcome finish(Engine& engine, const MessagePtr& message) {
  return Outcome(engine.runInline(message->op, [&] { engine.messages().finish(*message); }), message->op.counters);
}

inline void expectFinish(Engine& engine, const MessagePtr& message) {
  const Outcome outcome = finish(engine, message);
  EXPECT_TRUE(outcome.ok()) << outcome.what();
}

// Every rank's part on a thread of its own; what hangs is ended by its progress deadline.
inline void together(Ranks& ranks, const std::function<void(int rank, Engine& engine)>& part) {
  sideBySide(ranks.size(), [&](int rank) { part(rank, ranks.engine(rank)); });
}

}  // namespace lowcomm::test

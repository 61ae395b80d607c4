#include "pipeline/boundary_channel.h"

#include <atomic>
#include <utility>

#include "base/error.h"
#include "base/narrow_float.h"
#include "collective/source_sink.h"
#include "pipeline/delta_source_sink.h"

namespace lowcomm {
namespace {

constexpr uint64_t kDrawsOfChannels = 0x6368616e6e656c73ull;  // keeps their draws apart from those of ops

void expectPeer(const OpQueue& queue, int peer) {
  if (peer >= 0 && peer < queue.size() && peer != queue.rank()) return;
  throw ValueError("channel: expected a peer among the group's ranks 0..." + std::to_string(queue.size() - 1) +
                   " other than this one, " + std::to_string(queue.rank()) + ", got " + std::to_string(peer));
}

}  // namespace

ChannelMessage::ChannelMessage(std::shared_ptr<BoundaryChannel> channel, std::vector<uint64_t> samples)
    : channel_(std::move(channel)), samples_(std::move(samples)) {}

ChannelMessage::~ChannelMessage() {
  channel_->end(samples_);
}

bool ChannelMessage::spoilt() const {
  return message_ && message_->sends && static_cast<const P2pSend&>(*message_).spoilt();
}

void ChannelMessage::wait() {
  if (!message_) throw ValueError("a message of a channel: expected to be waited for once, got a second wait");
  const auto message = std::move(message_);
  if (update_ && !message->sends) update_->load();  // a send's slots were needed when it was encoded
  channel_->queue_->finish(*message);
  if (update_) update_->commit();
  channel_->end(samples_);
  samples_.clear();  // they may be under way again when this goes
}

ChannelBlock::ChannelBlock(std::shared_ptr<OpQueue> queue, int peer, uint32_t number)
    : queue_(std::move(queue)), peer_(peer), number_(number) {
  expectPeer(*queue_, peer);
  if (number >= kBlocks) {
    throw ValueError("block of channels: expected a number of 0..." + std::to_string(kBlocks - 1) + ", got " +
                     std::to_string(number));
  }
}

BoundaryChannel::BoundaryChannel(std::shared_ptr<OpQueue> queue, int peer, uint32_t number, ChannelOptions options,
                                 std::shared_ptr<SampleMemory> memory)
    : queue_(std::move(queue)), peer_(peer), number_(number), options_(std::move(options)), memory_(std::move(memory)) {
  expectPeer(*queue_, peer);
  if (number >= kChannels) {
    throw ValueError("channel: expected a number of 0..." + std::to_string(kChannels - 1) + ", got " +
                     std::to_string(number));
  }
  if (!memory_) return;
  if (!isCoded(options_.dtype)) {
    throw TypeError(std::string("channel with a memory: expected float32, float16 or bfloat16, got ") +
                    dtypeName(options_.dtype));
  }
  if (options_.codecs.seen.id == CodecId::none) {
    throw ValueError("channel with a memory: expected a codec for changes, got none");
  }
}

std::unique_ptr<ChannelMessage> BoundaryChannel::begin(uint64_t elements, std::vector<uint64_t> samples) {
  const std::string name = "channel " + std::to_string(number_);
  if (!memory_ && !samples.empty()) {
    throw ValueError(name + ": expected no samples without a memory, got " + std::to_string(samples.size()));
  }
  if (memory_ && samples.size() * memory_->format().elements() != elements) {
    throw ValueError(name + ": expected " + std::to_string(memory_->format().elements()) + " elements of each of " +
                     std::to_string(samples.size()) + " samples, got " + std::to_string(elements) + " in all");
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::set<uint64_t> mine;
    for (uint64_t sample : samples) {
      if (!mine.insert(sample).second) {
        throw ValueError(name + ": expected each sample once in a batch, got sample " + std::to_string(sample) +
                         " again");
      }
      if (under_way_.contains(sample)) {
        throw ValueError(name + ": expected samples of which none is under way, got sample " + std::to_string(sample));
      }
    }
    under_way_.insert(samples.begin(), samples.end());
  }
  std::unique_ptr<ChannelMessage> message(new ChannelMessage(shared_from_this(), std::move(samples)));
  if (memory_) message->update_ = std::make_unique<SampleUpdate>(memory_, message->samples_, options_.codecs);
  return message;
}

MessageKey BoundaryChannel::keyOf(const ChannelMessage& message) const {
  const MessageFlow flow{MessageFlow::Kind::channel, number_};
  MessageKey key{flow, {}, {}, options_.edge, options_.part, options_.gradient};
  if (message.update_) {
    key.samples = message.update_->keys();
    key.memory = message.update_->memoryName();
  }
  return key;
}

MessagePlan BoundaryChannel::planOf(const ChannelMessage& message, uint64_t elements) const {
  const size_t chunk_bytes = queue_->group().chunk_bytes;
  return message.update_ ? planP2p(message.update_->layout(), options_.dtype, chunk_bytes)
                         : planP2p(elements, options_.codecs.seen, options_.dtype, chunk_bytes);
}

std::unique_ptr<ChannelMessage> BoundaryChannel::send(const void* data, uint64_t elements,
                                                      std::vector<uint64_t> samples) {
  auto message = begin(elements, std::move(samples));
  const auto sent = std::make_shared<P2pSend>(queue_->group(), peer_, keyOf(*message), planOf(*message, elements));
  message->message_ = sent;
  message->name_ = sent->op.op;
  // One count per process: channels of one number follow each other, and no two messages may share draws.
  static std::atomic<uint32_t> count{0};
  const Draws draws = Draws{options_.seed ^ kDrawsOfChannels, streamOf(queue_->rank(), 0), count++}.slot(
      static_cast<uint64_t>(number_) << 32);
  if (!message->update_) {
    queue_->send(sent, makeSource(sent->op, nullptr, {sent->plan, data, draws}));
    return message;
  }
  message->update_->load();
  queue_->send(sent, std::make_unique<DeltaSource>(sent->op, sent->plan, data, *message->update_, draws));
  SampleCounters& counted = sent->op.counters.samples;
  for (const SampleKey& key : sent->key.samples) {
    ++(key.version == kNotKept ? counted.overflow : key.version > 0 ? counted.seen : counted.first);
  }
  message->counted_ = counted;
  return message;
}

std::unique_ptr<ChannelMessage> BoundaryChannel::recv(void* data, uint64_t elements, std::vector<uint64_t> samples) {
  auto message = begin(elements, std::move(samples));
  const auto received = std::make_shared<P2pRecv>(queue_->group(), peer_, keyOf(*message), planOf(*message, elements));
  message->message_ = received;
  message->name_ = received->op.op;
  queue_->recv(received, message->update_
                             ? std::make_unique<DeltaSink>(received->op, received->plan, data, *message->update_)
                             : makeSink(received->op, nullptr, {received->plan, data}));
  return message;
}

void BoundaryChannel::end(const std::vector<uint64_t>& samples) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (uint64_t sample : samples)
    under_way_.erase(sample);
}

}  // namespace lowcomm

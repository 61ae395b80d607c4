#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "engine/op_queue.h"
#include "messages/p2p_message.h"
#include "pipeline/sample_memory.h"
#include "pipeline/sample_update.h"

namespace lowcomm {

// The options of a channel, equal on both sides: their messages are compared before anything is sent.
struct ChannelOptions {
  DType dtype = DType::float32;
  DeltaCodecs codecs;                // `seen` of all messages where there is no memory; none: exact
  uint64_t seed = 0;                 // of stochastic codecs
  std::string edge = {}, part = {};  // names, as MessageKey's; each side's affair
  std::string gradient = {};         // as MessageKey's, equal on both sides
};

class BoundaryChannel;

// A message under way, for one thread to wait for.
class ChannelMessage {
 public:
  // Blocks until the message is through, then commits its samples to the memory. Once; throws what OpQueue::finish
  // does, and the memory is then as it was before.
  void wait();

  // Whether it is a send whose elements could not be encoded: wait() will throw.
  bool spoilt() const;

  // "send of channel 771, forward boundary 0, micro-batch 3".
  const std::string& name() const { return name_; }

  // The counters of a send's samples; empty for a receive.
  const SampleCounters& samples() const { return counted_; }

  ~ChannelMessage();

 private:
  friend class BoundaryChannel;
  ChannelMessage(std::shared_ptr<BoundaryChannel> channel, std::vector<uint64_t> samples);

  const std::shared_ptr<BoundaryChannel> channel_;
  std::vector<uint64_t> samples_;  // under way; none once it is through
  SampleCounters counted_;
  std::string name_;
  std::unique_ptr<SampleUpdate> update_;  // null without a memory
  std::shared_ptr<P2pMessage> message_;
};

// The channels of one boundary between two ranks: kBlockChannels numbers from number · kBlockChannels on. If one side
// has failed in the middle of a step both withdraw, so that neither waits for messages that the other will not send,
// and begin again together (P2p::withdraw, P2p::resume). Thread-safe.
class ChannelBlock {
 public:
  // ValueError for a peer outside of the group, or this rank itself, or a number from kBlocks on.
  ChannelBlock(std::shared_ptr<OpQueue> queue, int peer, uint32_t number);

  void withdraw(const std::string& why) { queue_->withdraw(peer_, number_, why); }
  // The first cause of a withdrawal, on whichever side; empty where there was none.
  std::string withdrawn() const { return queue_->withdrawn(peer_, number_); }
  void resume() { queue_->resume(peer_, number_); }

 private:
  const std::shared_ptr<OpQueue> queue_;
  const int peer_;
  const uint32_t number_;
};

// One direction of one boundary between two stages: tensors from one rank to another, in order. With a memory their
// samples travel as changes (AQ-SGD, NeurIPS 2022); without one each tensor is encoded by itself, or exact.
// Thread-safe.
class BoundaryChannel : public std::enable_shared_from_this<BoundaryChannel> {
 public:
  // `number` is the channel's among those between the two ranks. With a memory: TypeError if options.dtype is not one
  // of the three float types, ValueError if the codec of changes is `none`.
  BoundaryChannel(std::shared_ptr<OpQueue> queue, int peer, uint32_t number, ChannelOptions options,
                  std::shared_ptr<SampleMemory> memory);

  // Encodes and posts a tensor of `elements`, contiguous in host memory, or posts the receive of one. `samples`, with a
  // memory and then only: the number of each sample; elements are theirs together. Nobody reads `data` of a send
  // afterwards; of a receive it is written until wait() has returned. Throws ValueError for samples that repeat or are
  // under way, for elements that are not theirs, and what OpQueue::send and recv do.
  std::unique_ptr<ChannelMessage> send(const void* data, uint64_t elements, std::vector<uint64_t> samples);
  std::unique_ptr<ChannelMessage> recv(void* data, uint64_t elements, std::vector<uint64_t> samples);

  DType dtype() const { return options_.dtype; }

 private:
  friend class ChannelMessage;
  std::unique_ptr<ChannelMessage> begin(uint64_t elements, std::vector<uint64_t> samples);
  MessageKey keyOf(const ChannelMessage& message) const;
  MessagePlan planOf(const ChannelMessage& message, uint64_t elements) const;
  void end(const std::vector<uint64_t>& samples);

  const std::shared_ptr<OpQueue> queue_;
  const int peer_;
  const uint32_t number_;
  const ChannelOptions options_;
  const std::shared_ptr<SampleMemory> memory_;
  std::mutex mutex_;              // of all below
  std::set<uint64_t> under_way_;  // samples of messages that nobody has waited for
};

}  // namespace lowcomm

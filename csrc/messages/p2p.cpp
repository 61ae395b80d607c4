#include "messages/p2p.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "messages/p2p_parts.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {

P2p::FlowLock::FlowLock(P2p& p2p, const Key& key) : p2p_(p2p), key_(key) {
  std::lock_guard<std::mutex> lock(p2p_.mutex_);
  const auto [at, fresh] = p2p_.flows_.try_emplace(key);
  flow_ = &at->second;
  ++flow_->posting;
  const auto& [peer, name, sends] = key;
  if (!fresh || sends) return;
  flow_->last = p2p_.received_[peer].last(name);
  flow_->counted = name.channel() || flow_->last > 0;
}

P2p::FlowLock::~FlowLock() {
  std::lock_guard<std::mutex> lock(p2p_.mutex_);
  --flow_->posting;
  p2p_.close(key_, *flow_);
}

P2p::P2p(GroupContext& group)
    : group_(group),
      board_(group, {[this](int peer, Announcement announcement) { received(peer, std::move(announcement)); },
                     [this](int peer, const Withdrawal& withdrawal) { withdrawals_->received(peer, withdrawal); },
                     [this](int peer, const AnySourceMessage& message) { any_source_->received(peer, message); },
                     [this](int peer, const TransportError& why) { lost(peer, why); }}),
      any_source_(std::make_unique<AnySource>(*this)),
      withdrawals_(std::make_unique<Withdrawals>(*this)) {}

P2p::~P2p() {
  stop();
}

void P2p::recvAny(const std::shared_ptr<AnyRecv>& recv) {
  any_source_->recv(recv);
}

void P2p::withdraw(int peer, uint32_t block, const std::string& why) {
  withdrawals_->withdraw(peer, block, why);
}

std::string P2p::withdrawn(int peer, uint32_t block) {
  return withdrawals_->withdrawn(peer, block);
}

void P2p::resume(OpContext& op, int peer, uint32_t block) {
  withdrawals_->resume(op, peer, block);
}

void P2p::send(const std::shared_ptr<P2pSend>& message, std::unique_ptr<Source> source) {
  board_.listen(message->peer);
  FlowLock posting(*this, keyOf(*message));
  Flow& flow = posting.flow();
  std::lock_guard<std::mutex> in_order(flow.in_order);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (message->key.flow.channel()) withdrawals_->expectTaken(*message);
    message->op.sequence = sent_[message->peer].next(message->key.flow);
    flow.under_way.push_back(message);
    flow.unannounced.push_back(message);
    const auto gone = lost_.find(message->peer);
    if (gone != lost_.end()) message->lose(gone->second);
  }
  message->op.conversing = true;
  message->note(0);
  pair(flow);
  any_source_->offer(message->peer, message->key.flow);
  message->encode(*source);
}

void P2p::recv(const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink) {
  FlowLock posting(*this, keyOf(*message));
  Flow& flow = posting.flow();
  std::lock_guard<std::mutex> in_order(flow.in_order);
  const bool of_channel = message->key.flow.channel();
  std::unique_lock<std::mutex> announcing;
  if (of_channel) {
    board_.listen(message->peer);  // for its withdrawal
    announcing = std::unique_lock(withdrawals_->block(message->peer, message->key.flow.block()).announcing);
  }
  post(flow, message, std::move(sink), of_channel);
}

// With the flow's in_order.
void P2p::post(Flow& flow, const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink, bool of_channel) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (of_channel) withdrawals_->expectTaken(*message);
    MessageTags& tags = tags_.try_emplace(message->peer, group_.rank(), message->peer).first->second;
    do {
      message->first_tag_ = tags.next();
    } while (tags.comeAgain() && underWay(message->peer, *message->first_tag_));
    message->op.sequence = flow.last = numberAfter(flow.last);
    flow.under_way.push_back(message);
    any_source_->countOwn(message->peer, message->key.flow);
  }
  message->sink_ = std::move(sink);
  message->op.conversing = true;
  message->note(static_cast<uint32_t>(message->plan.frames.size()));
  try {
    message->post(board_);
  } catch (const TransportError& error) {
    message->op.fail(message->peer, error, "starting a transfer");
  }
}

void P2p::received(int peer, Announcement announcement) {
  const MessageFlow name = announcement.flow;
  if (!MessageTags::belongs(announcement.first_tag, peer, group_.rank()))
    throw WireError("announcement: expected a first tag that its receiver may pick, got " +
                    std::to_string(announcement.first_tag));
  FlowLock posting(*this, {peer, name, true});
  bool refused = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posting.flow().announced.push_back(std::move(announcement));
    any_source_->countTheirs(peer, name);
    refused = name.channel() && withdrawals_->refuses(peer, name);
  }
  refused ? withdrawals_->refuseRest(peer, name) : pair(posting.flow());
}

// Pairs a flow's oldest message with its oldest announcement, where there are both. A message's frames are handed
// over before those of the next one: `pairing` is taken before the two leave their queues.
void P2p::pair(Flow& flow) {
  std::lock_guard<std::mutex> pairing(flow.pairing);
  std::shared_ptr<P2pSend> message;
  Announcement announcement;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (flow.unannounced.empty() || flow.announced.empty()) return;
    message = std::move(flow.unannounced.front());
    announcement = std::move(flow.announced.front());
    flow.unannounced.pop_front();
    flow.announced.pop_front();
    message->first_tag_ = announcement.first_tag;
  }
  message->announced(announcement);
}

void P2p::lost(int peer, const TransportError& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  lost_.try_emplace(peer, why);
  for (auto& [key, flow] : flows_) {
    if (std::get<0>(key) != peer) continue;
    for (const auto& message : flow.unannounced)
      message->lose(why);
  }
  any_source_->lose(why);
  changed_.notify_all();
}

// With the lock. Null: it is through, or has not been posted.
std::shared_ptr<P2pMessage> P2p::underWay(int peer, uint32_t first_tag) {
  for (auto& [key, flow] : flows_) {
    if (std::get<0>(key) != peer) continue;
    for (const auto& message : flow.under_way)
      if (message->first_tag_ == first_tag) return message;
  }
  return nullptr;
}

void P2p::breakWaits() {
  for (int peer = 0; peer < group_.size(); ++peer)
    lost(peer, TransportError(TransportError::Kind::cancelled, peer, "the lane was cancelled"));
}

void P2p::finish(P2pMessage& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (message.dropped_) std::rethrow_exception(message.op.refusedBecause(message.peer, "it was withdrawn"));
    message.finishing_ = true;
  }
  std::exception_ptr error;
  if (message.sends) {
    auto& send = static_cast<P2pSend&>(message);
    send.waitForReceiver();
    send.waitForArrival();
    error = send.error();
  } else {
    error = finishRecv(static_cast<P2pRecv&>(message));
  }
  message.op.conversing = false;
  message.op.note([&](OpProgress::State& state) {
    state.received_bytes = message.op.counters.received_bytes;
    if (!error) state.end("");  // else it ends with its error
  });
  forget(message);
  group_.frames.trim();
  group_.transport.acknowledge();
  if (error) std::rethrow_exception(error);
}

// Returns why the message was not delivered though the group goes on; null where it was.
std::exception_ptr P2p::finishRecv(P2pRecv& message) {
  const auto sink = std::move(message.sink_);
  for (size_t k = 0; k < message.plan.frames.size(); ++k) {
    const auto payload = message.take(k, [&](const FrameHeader& got) { adopt(message, got.sequence); });
    if (payload) {
      Stopwatch watch(message.op, Doing::decode);
      message.op.attribute(message.peer, [&] { sink->take(k, *payload, message.peer); });
    }
    message.frames_[k].reset();  // the next message's; peak memory falls while this one is decoded
  }
  sink->wait();
  // Its frames came in answer to it: it has left.
  message.op.wait(*message.announcement_.transfer, message.peer, "announcing a receive");
  message.announcement_ = {};
  message.release();
  return message.error();
}

// A receive learns from its first frame how its sender counts the tag.
void P2p::adopt(P2pRecv& message, uint32_t number) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto flow = flows_.find(keyOf(message));  // gone where a later message was finished first
    ReceiverNumbers& received = received_[message.peer];
    if ((number & kSharedNumber) == 0) {
      if (number == message.op.sequence && flow != flows_.end()) flow->second.counted = true;
      return;
    }
    const bool counted = flow == flows_.end() ? received.last(message.key.flow) > 0 : flow->second.counted;
    if (counted) return;  // and is refused, as any other number that is not expected
    if (!message.taken_down_ && !received.take(number))
      throw WireError("message number: expected one that has not come before, got " + std::to_string(number) +
                      " again");
    message.taken_down_ = true;
    message.op.sequence = number;
  }
  message.op.note([&](OpProgress::State& state) { state.sequence = number; });
}

// With the lock: records the number in the first frame of a receive that completed although no thread waits for it.
// Without it in the common count, all later numbers would be kept for ever.
void P2p::takeDown(P2pRecv& message) {
  const std::optional<FrameHeader> got =
      message.firstHeader();  // one that does not open fails in its holder's finish()
  if (!got || got->epoch != group_.epoch || (got->sequence & kSharedNumber) == 0) return;
  message.taken_down_ = received_[message.peer].take(got->sequence);
}

// Erases, with a message of a tag, the older ones of that tag that completed and that no thread waits for.
void P2p::forget(P2pMessage& done) {
  std::deque<std::shared_ptr<P2pMessage>> dropped;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto flow = flows_.find(keyOf(done));
  if (flow == flows_.end()) return;
  auto& under_way = flow->second.under_way;
  const auto at = std::find_if(under_way.begin(), under_way.end(), [&](const auto& m) { return m.get() == &done; });
  if (at == under_way.end()) return;  // a later one was through before
  const auto isKept = [&](const std::shared_ptr<P2pMessage>& message) {
    if (message.get() == &done) return false;
    if (message->finishing_ || !message->isThrough()) return true;
    message->op.note([](OpProgress::State& state) { state.end(""); });
    if (auto* const received = dynamic_cast<P2pRecv*>(message.get())) takeDown(*received);
    return false;
  };
  const auto first = done.key.flow.channel() ? at : under_way.begin();  // a channel's messages are all finished
  const auto gone = std::stable_partition(first, std::next(at), isKept);
  dropped.assign(std::make_move_iterator(gone), std::make_move_iterator(std::next(at)));
  under_way.erase(gone, std::next(at));
  close(flow->first, flow->second);
}

// With the lock: erases a flow that no thread uses. If its sender counts the tag by itself, the number stays.
void P2p::close(const Key& key, Flow& flow) {
  const bool waiting = !flow.unannounced.empty() || !flow.announced.empty();
  if (flow.posting > 0 || !flow.under_way.empty() || waiting) return;
  const auto [peer, name, sends] = key;
  if (flow.counted) received_[peer].remember(name, flow.last);
  flows_.erase({peer, name, sends});
}

}  // namespace lowcomm

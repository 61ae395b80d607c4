// Receives from any rank (P2p::recvAny says how).
#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "messages/p2p.h"
#include "transport/transport.h"

namespace lowcomm {

// The wait for a sender, as a transfer: OpContext::wait counts it and puts its failure into words.
class AnyRecv::SenderWait : public Transfer {
 public:
  explicit SenderWait(AnyRecv& recv) : recv_(recv) {}

  void wait(std::chrono::milliseconds deadline) override {
    std::unique_lock<std::mutex> lock(recv_.mutex_);
    const auto known = [&] { return recv_.message_ || recv_.error_ || recv_.lost_; };
    if (!recv_.changed_.wait_for(lock, deadline, known)) {
      throw TransportError(TransportError::Kind::timed_out, -1,
                           "timed out waiting " + std::to_string(deadline.count()) + " ms for a sender");
    }
    if (recv_.error_) std::rethrow_exception(recv_.error_);
    if (!recv_.message_) throw *recv_.lost_;
  }

 private:
  AnyRecv& recv_;
};

AnyRecv::AnyRecv(GroupContext& group, MessageFlow flow, Make make)
    : op(group, "recv with " + flow.name() + " from any rank", 0), flow(flow), make_(std::move(make)) {}

std::shared_ptr<P2pRecv> AnyRecv::wait() {
  SenderWait sender(*this);
  op.wait(sender, -1, "waiting for a sender");
  std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

void AnyRecv::settle(std::shared_ptr<P2pRecv> message, std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  message_ = std::move(message);
  error_ = std::move(error);
  changed_.notify_all();
}

void AnyRecv::lose(const TransportError& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!lost_) lost_ = why;
  changed_.notify_all();
}

void P2p::recvAny(const std::shared_ptr<AnyRecv>& recv) {
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer != group_.rank()) board_.listen(peer);
  }
  recv->op.note([](OpProgress::State& state) { state.start(); });
  std::lock_guard<std::mutex> choosing(choosing_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (static_cast<int>(lost_.size()) >= group_.size() - 1 && !lost_.empty()) recv->lose(lost_.begin()->second);
    any_[recv->flow].waiting.push_back(recv);
  }
  choose(recv->flow);
}

// With choosing_: gives offers that still hold to the receives that wait, oldest to oldest, and asks for as many more
// as there may be.
void P2p::choose(const MessageFlow& name) {
  AnySource* source;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    source = &any_[name];  // an entry stays where it is
  }
  while (!source->waiting.empty() && !source->offers.empty()) {
    const int peer = source->offers.front();
    source->offers.pop_front();
    FlowLock posting(*this, {peer, name, false});
    std::lock_guard<std::mutex> in_order(posting.flow().in_order);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      AnySource::Peer& asked = source->peers[peer];
      const bool holds = asked.offered == asked.announced;
      asked.asked = false;
      if (!holds) continue;  // a receive from this rank by name has had the message
    }
    const std::shared_ptr<AnyRecv> recv = source->waiting.front();
    source->waiting.pop_front();
    try {
      auto [message, sink] = recv->make_(peer);
      message->op.progress = recv->op.progress;
      post(posting.flow(), message, std::move(sink), nullptr);
      recv->settle(message, nullptr);
    } catch (...) {
      recv->settle(nullptr, std::current_exception());
    }
  }
  if (source->waiting.empty()) return;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    FlowLock posting(*this, {peer, name, false});
    std::lock_guard<std::mutex> in_order(posting.flow().in_order);  // with what is announced of the flow
    AnySource::Peer* asked;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      asked = &source->peers[peer];
      if (asked->asked || lost_.contains(peer)) continue;
      asked->asked = true;
      asked->announced = 0;
    }
    try {
      asked->question = board_.tell(peer, AnySourceWord{name, {}});  // the one before has arrived: it was answered
    } catch (const TransportError&) {
      // The thread that listens to the peer hears of it too.
    }
  }
}

void P2p::heardAnySource(int peer, const AnySourceWord& word) {
  if (!word.offer) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Wanted& wanted = wanted_[{peer, word.flow}];
      wanted.heard = 0;
      wanted.answered = false;
    }
    return offer(peer, word.flow);
  }
  std::lock_guard<std::mutex> choosing(choosing_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto source = any_.find(word.flow);
    if (source == any_.end() || !source->second.peers[peer].asked)
      throw WireError("offer of a message with " + word.flow.name() + ": expected none that was not asked for");
    source->second.peers[peer].offered = *word.offer;
    source->second.offers.push_back(peer);
  }
  choose(word.flow);
}

// Tells a rank that has asked, once, that the next receive of the flow that it announces will have a message.
void P2p::offer(int peer, const MessageFlow& name) {
  Wanted* wanted;
  uint32_t heard;
  std::lock_guard<std::mutex> offering(offering_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto asked = wanted_.find({peer, name});
    const auto flow = flows_.find({peer, name, true});
    if (asked == wanted_.end() || asked->second.answered || flow == flows_.end()) return;
    if (flow->second.unannounced.size() <= flow->second.announced.size()) return;  // those there are go elsewhere
    wanted = &asked->second;
    wanted->answered = true;
    heard = wanted->heard;
  }
  try {
    wanted->offer = board_.tell(peer, AnySourceWord{name, heard});  // the one before has arrived: it was asked again
  } catch (const TransportError&) {
    // As above.
  }
}

// With the lock.
void P2p::loseAny(const TransportError& why) {
  if (static_cast<int>(lost_.size()) < group_.size() - 1) return;
  for (auto& [name, source] : any_) {
    for (const auto& recv : source.waiting)
      recv->lose(why);
  }
}

}  // namespace lowcomm

// Receives from any rank (P2p::recvAny says how).
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "messages/p2p_parts.h"
#include "transport/transport.h"

namespace lowcomm {

AnyRecv::AnyRecv(GroupContext& group, MessageFlow flow, Make make)
    : op(group, "recv with " + flow.name() + " from any rank", 0), flow(flow), make_(std::move(make)) {}

std::shared_ptr<P2pRecv> AnyRecv::wait() {
  ConditionWait sender(mutex_, changed_, -1, "a sender", [this] {
    if (error_) std::rethrow_exception(error_);
    if (!message_ && lost_) throw TransportError(*lost_);
    return message_ != nullptr;
  });
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

void P2p::AnySource::recv(const std::shared_ptr<AnyRecv>& recv) {
  for (int peer = 0; peer < p2p_.group_.size(); ++peer) {
    if (peer != p2p_.group_.rank()) p2p_.board_.listen(peer);
  }
  recv->op.note([](OpProgress::State& state) { state.start(); });
  std::lock_guard<std::mutex> choosing(choosing_);
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    if (static_cast<int>(p2p_.lost_.size()) >= p2p_.group_.size() - 1 && !p2p_.lost_.empty())
      recv->lose(p2p_.lost_.begin()->second);
    receives_[recv->flow].waiting.push_back(recv);
  }
  choose(recv->flow);
}

// With choosing_: gives offers that still hold to the receives that wait, oldest to oldest, and asks for as many more
// as there may be.
void P2p::AnySource::choose(const MessageFlow& name) {
  Receives* source;
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    source = &receives_[name];  // an entry stays where it is
  }
  while (!source->waiting.empty() && !source->offers.empty()) {
    const int peer = source->offers.front();
    source->offers.pop_front();
    FlowLock posting(p2p_, {peer, name, false});
    std::lock_guard<std::mutex> in_order(posting.flow().in_order);
    {
      std::lock_guard<std::mutex> lock(p2p_.mutex_);
      Receives::Peer& asked = source->peers[peer];
      const bool holds = asked.offered == asked.announced;
      asked.asked = false;
      if (!holds) continue;  // a receive from this rank by name has had the message
    }
    const std::shared_ptr<AnyRecv> recv = source->waiting.front();
    source->waiting.pop_front();
    try {
      auto [message, sink] = recv->make_(peer);
      message->op.progress = recv->op.progress;
      p2p_.post(posting.flow(), message, std::move(sink), /*of_channel=*/false);
      recv->settle(message, nullptr);
    } catch (...) {
      recv->settle(nullptr, std::current_exception());
    }
  }
  if (source->waiting.empty()) return;
  for (int peer = 0; peer < p2p_.group_.size(); ++peer) {
    if (peer == p2p_.group_.rank()) continue;
    FlowLock posting(p2p_, {peer, name, false});
    std::lock_guard<std::mutex> in_order(posting.flow().in_order);  // with what is announced of the flow
    Receives::Peer* asked;
    {
      std::lock_guard<std::mutex> lock(p2p_.mutex_);
      asked = &source->peers[peer];
      if (asked->asked || p2p_.lost_.contains(peer)) continue;
      asked->asked = true;
      asked->announced = 0;
    }
    try {
      asked->question =
          p2p_.board_.tell(peer, AnySourceMessage{name, {}});  // the one before has arrived: it was answered
    } catch (const TransportError&) {
      // The thread that listens to the peer finds the same error.
    }
  }
}

void P2p::AnySource::received(int peer, const AnySourceMessage& message) {
  if (!message.offer) {
    {
      std::lock_guard<std::mutex> lock(p2p_.mutex_);
      Wanted& wanted = wanted_[{peer, message.flow}];
      wanted.announced = 0;
      wanted.answered = false;
    }
    return offer(peer, message.flow);
  }
  std::lock_guard<std::mutex> choosing(choosing_);
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    const auto source = receives_.find(message.flow);
    if (source == receives_.end() || !source->second.peers[peer].asked)
      throw WireError("offer of a message with " + message.flow.name() + ": expected none that was not asked for");
    source->second.peers[peer].offered = *message.offer;
    source->second.offers.push_back(peer);
  }
  choose(message.flow);
}

void P2p::AnySource::offer(int peer, const MessageFlow& name) {
  Wanted* wanted;
  uint32_t announced;
  std::lock_guard<std::mutex> offering(offering_);
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    const auto asked = wanted_.find({peer, name});
    const auto flow = p2p_.flows_.find({peer, name, true});
    if (asked == wanted_.end() || asked->second.answered || flow == p2p_.flows_.end()) return;
    if (flow->second.unannounced.size() <= flow->second.announced.size()) return;  // those there are go elsewhere
    wanted = &asked->second;
    wanted->answered = true;
    announced = wanted->announced;
  }
  try {
    wanted->offer =
        p2p_.board_.tell(peer, AnySourceMessage{name, announced});  // the one before has arrived: it was asked again
  } catch (const TransportError&) {
    // As above.
  }
}

void P2p::AnySource::lose(const TransportError& why) {
  if (static_cast<int>(p2p_.lost_.size()) < p2p_.group_.size() - 1) return;
  for (auto& [name, source] : receives_) {
    for (const auto& recv : source.waiting)
      recv->lose(why);
  }
}

void P2p::AnySource::countOwn(int peer, const MessageFlow& name) {
  const auto receives = receives_.find(name);
  if (receives != receives_.end()) ++receives->second.peers[peer].announced;
}

void P2p::AnySource::countTheirs(int peer, const MessageFlow& name) {
  const auto wanted = wanted_.find({peer, name});
  if (wanted != wanted_.end()) ++wanted->second.announced;
}

}  // namespace lowcomm

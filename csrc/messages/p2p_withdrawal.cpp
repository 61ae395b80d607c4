// Withdrawals from blocks of channels (P2p::withdraw says how).
#include <algorithm>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "messages/p2p_parts.h"
#include "transport/transport.h"

namespace lowcomm {

void P2p::Withdrawals::withdraw(int peer, uint32_t number, const std::string& why) {
  p2p_.board_.listen(peer);
  Block& block = this->block(peer, number);
  if (!close(block, beginningOf(why, kMaxErrorText))) return;
  tell(peer, number, block);
  refuseAll(peer, number);
}

std::string P2p::Withdrawals::withdrawn(int peer, uint32_t number) {
  std::lock_guard<std::mutex> lock(p2p_.mutex_);
  const auto known = blocks_.find({peer, number});
  return known == blocks_.end() ? "" : known->second.why;
}

// Once a period: the first cause counts. False where the block was closed before.
bool P2p::Withdrawals::close(Block& block, const std::string& why) {
  std::lock_guard<std::mutex> announcing(
      block.announcing);  // a receive that was taken is announced before this is told
  std::lock_guard<std::mutex> lock(p2p_.mutex_);
  if (block.closed) return false;
  block.closed = true;
  block.why = why;
  return true;
}

void P2p::Withdrawals::tell(int peer, uint32_t number, Block& block) {
  block.delivery = p2p_.board_.tell(peer, Withdrawal{number, block.period, block.why});
}

void P2p::Withdrawals::refuseAll(int peer, uint32_t block) {
  for (const Key& key : keysOf(peer, block))
    if (std::get<2>(key)) refuseRest(peer, std::get<1>(key));
}

// Called in order with announcements: when this returns, all of the peer's in its period have been answered.
void P2p::Withdrawals::received(int peer, const Withdrawal& theirs) {
  Block& block = this->block(peer, theirs.block);
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    const bool next = block.closed && block.peer_closed && !block.next && theirs.period == block.period + 1;
    if (next) {
      block.next = theirs.why;
      return;
    }
    if (block.peer_closed || theirs.period != block.period) {
      throw WireError("withdrawal of block " + std::to_string(theirs.block) + ": expected period " +
                      std::to_string(block.period + (block.peer_closed ? 1 : 0)) + ", got " +
                      std::to_string(theirs.period));
    }
  }
  if (close(block, theirs.why)) tell(peer, theirs.block, block);
  answered(peer, theirs.block, block);
}

// The peer will announce nothing more of this period: once all that it has announced is answered, what comes is of the
// next one.
void P2p::Withdrawals::answered(int peer, uint32_t number, Block& block) {
  refuseAll(peer, number);
  std::lock_guard<std::mutex> lock(p2p_.mutex_);
  block.peer_closed = true;
  p2p_.changed_.notify_all();
}

void P2p::Withdrawals::refuseRest(int peer, const MessageFlow& name) {
  FlowLock posting(p2p_, {peer, name, true});
  Flow& flow = posting.flow();
  std::lock_guard<std::mutex> in_order(flow.in_order), pairing(flow.pairing);
  std::deque<std::shared_ptr<P2pSend>> behind;
  std::deque<Announcement> unanswered;
  std::vector<std::shared_ptr<P2pSend>> answers;
  std::string why;
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    const Block& block = blocks_[{peer, name.block()}];
    if (!block.closed || block.peer_closed) return;  // all have been answered: what there is belongs to the next period
    why = "the messages of its block were withdrawn: " + block.why;
    behind.swap(flow.unannounced);
    unanswered.swap(flow.announced);
    p2p_.sent_[peer].giveBack(name, static_cast<uint32_t>(behind.size()));
    for (size_t i = 0; i < unanswered.size(); ++i) {
      answers.push_back(std::make_shared<P2pSend>(p2p_.group_, peer, MessageKey{name},
                                                  planP2p(0, CodecSpec{}, DType::float32, p2p_.group_.chunk_bytes)));
      answers[i]->op.sequence = p2p_.sent_[peer].next(name);
      answers[i]->first_tag_ = unanswered[i].first_tag;
      flow.under_way.push_back(answers[i]);
    }
  }
  for (const auto& message : behind)
    message->withdraw(why);
  for (size_t i = 0; i < answers.size(); ++i)
    answers[i]->refuse(unanswered[i], why);
}

void P2p::Withdrawals::resume(OpContext& op, int peer, uint32_t number) {
  withdraw(peer, number, "its messages begin anew");
  Block& block = this->block(peer, number);
  op.conversing = true;
  ConditionWait withdrawn(p2p_.mutex_, p2p_.changed_, peer, "its withdrawal", [&] {
    if (!block.peer_closed && p2p_.lost_.contains(peer)) throw TransportError(p2p_.lost_.at(peer));
    return block.peer_closed;
  });
  op.wait(withdrawn, peer, "waiting for its withdrawal");
  op.wait(*block.delivery.transfer, peer, "withdrawing");
  // Messages that no thread waits for; those that are being finished are removed by their threads.
  std::vector<std::shared_ptr<P2pMessage>> left;
  const std::vector<Key> keys = keysOf(peer, number);
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    for (const Key& key : keys) {
      const auto flow = p2p_.flows_.find(key);
      if (flow == p2p_.flows_.end()) continue;
      for (const auto& message : flow->second.under_way) {
        if (message->finishing_) continue;
        message->dropped_ = true;
        left.push_back(message);
      }
    }
  }
  for (const auto& message : left)
    message->drop(op);
  std::optional<std::string> next;
  {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    for (const Key& key : keys) {
      const auto flow = p2p_.flows_.find(key);
      if (flow == p2p_.flows_.end()) continue;
      std::erase_if(flow->second.under_way,
                    [&](const auto& message) { return std::find(left.begin(), left.end(), message) != left.end(); });
      p2p_.close(key, flow->second);
    }
    block.delivery = {};
    block.closed = block.peer_closed = false;
    block.why.clear();
    ++block.period;
    next = std::exchange(block.next, std::nullopt);
  }
  op.conversing = false;
  if (!next) return;
  close(block, *next);
  answered(peer, number, block);
  tell(peer, number, block);  // last: the peer may then announce what is of the period after
}

std::vector<P2p::Key> P2p::Withdrawals::keysOf(int peer, uint32_t block) {
  std::lock_guard<std::mutex> lock(p2p_.mutex_);
  std::vector<Key> keys;
  for (const auto& [key, flow] : p2p_.flows_) {
    const auto& [other, name, sends] = key;
    if (other == peer && name.channel() && name.block() == block) keys.push_back(key);
  }
  return keys;
}

P2p::Withdrawals::Block& P2p::Withdrawals::block(int peer, uint32_t number) {
  std::lock_guard<std::mutex> lock(p2p_.mutex_);
  return blocks_[{peer, number}];
}

void P2p::Withdrawals::expectTaken(const P2pMessage& message) {
  const Block& block = blocks_[{message.peer, message.key.flow.block()}];
  if (!block.closed) return;
  std::rethrow_exception(
      message.op.refusedBecause(message.peer, "the messages of its block were withdrawn: " + block.why));
}

// After both sides have withdrawn an announcement is of the next period, which has not begun here.
bool P2p::Withdrawals::refuses(int peer, const MessageFlow& name) {
  const Block& block = blocks_[{peer, name.block()}];
  return block.closed && !block.peer_closed;
}

}  // namespace lowcomm

#include "collective/message_flow.h"

#include <algorithm>

namespace lowcomm {

std::string MessageFlow::name() const {
  return (channel() ? "channel " : "tag ") + std::to_string(number);
}

uint32_t MessageFlow::transportTag(size_t k, int connections) const {
  if (!channel()) return kFirstP2pTag + number;
  const auto turns = std::min(static_cast<uint32_t>(connections), kChannelConnections);
  return kFirstChannelTag + number * kChannelConnections + static_cast<uint32_t>(k) % turns;
}

uint32_t SenderNumbers::next(const MessageFlow& flow) {
  auto known = counted_.find(flow);
  if (known == counted_.end()) {
    if (!flow.channel() && tags_ == kCountedTags) return kSharedNumber | (shared_ = numberAfter(shared_));
    tags_ += !flow.channel();
    known = counted_.emplace(flow, 0).first;
  }
  return known->second = numberAfter(known->second);
}

uint32_t ReceiverNumbers::last(const MessageFlow& flow) const {
  const auto known = counted_.find(flow);
  return known == counted_.end() ? 0 : known->second;
}

bool ReceiverNumbers::take(uint32_t number) {
  number &= ~kSharedNumber;
  // Numbers come around after 2^31: one from the half behind is an old one.
  const uint32_t ahead = (number - whole_) & ~kSharedNumber;
  if (ahead == 0 || ahead >= kSharedNumber / 2 || !further_.insert(number).second) return false;
  while (further_.erase(numberAfter(whole_)) > 0)
    whole_ = numberAfter(whole_);
  return true;
}

}  // namespace lowcomm

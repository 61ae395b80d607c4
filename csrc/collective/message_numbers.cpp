#include "collective/message_numbers.h"

namespace lowcomm {

uint32_t SentNumbers::next(uint32_t tag) {
  auto known = counted_.find(tag);
  if (known == counted_.end()) {
    if (counted_.size() == kCountedTags) return kSharedNumber | (shared_ = numberAfter(shared_));
    known = counted_.emplace(tag, 0).first;
  }
  return known->second = numberAfter(known->second);
}

uint32_t ReceivedNumbers::last(uint32_t tag) const {
  const auto known = counted_.find(tag);
  return known == counted_.end() ? 0 : known->second;
}

bool ReceivedNumbers::take(uint32_t number) {
  number &= ~kSharedNumber;
  // Numbers come around after 2^31: one from the half behind is an old one.
  const uint32_t ahead = (number - whole_) & ~kSharedNumber;
  if (ahead == 0 || ahead >= kSharedNumber / 2 || !further_.insert(number).second) return false;
  while (further_.erase(numberAfter(whole_)) > 0)
    whole_ = numberAfter(whole_);
  return true;
}

}  // namespace lowcomm

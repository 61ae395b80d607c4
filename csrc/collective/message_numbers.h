#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

namespace lowcomm {

// The numbers of messages from one rank to another (FORMAT.md, "Point to point"). What is kept of them is bounded,
// however many tags a program uses: the first kCountedTags that a sender uses are counted each by itself, and the
// messages of all others by one count, told apart by kSharedNumber. Not thread-safe.
inline constexpr size_t kCountedTags = 1024;
inline constexpr uint32_t kSharedNumber = 1u << 31;  // set in a number of the common count

// Of a sender.
class SentNumbers {
 public:
  // The number of the next message with this tag.
  uint32_t next(uint32_t tag);

 private:
  std::map<uint32_t, uint32_t> counted_;  // by tag, the last number
  uint32_t shared_ = 0;
};

// Of a receiver, who cannot know how its sender counts a tag until a message of it has come.
class ReceivedNumbers {
 public:
  // The last number of a tag that its sender counts by itself; 0 of any other.
  uint32_t last(uint32_t tag) const;
  void remember(uint32_t tag, uint32_t last) { counted_[tag] = last; }

  // Takes down a number of the common count. False where it has come before.
  bool take(uint32_t number);

 private:
  std::map<uint32_t, uint32_t> counted_;
  uint32_t whole_ = 0;          // all shared numbers up to here have come
  std::set<uint32_t> further_;  // those that came out of order: tags may be received in any
};

// The number after `number` in its count.
constexpr uint32_t numberAfter(uint32_t number) {
  return (number & kSharedNumber) | ((number + 1) & ~kSharedNumber);
}

}  // namespace lowcomm

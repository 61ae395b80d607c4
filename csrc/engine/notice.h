#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/context.h"

namespace lowcomm {

// How a rank that gives a group up tells the others why. Each rank keeps one receive posted to every peer on the
// control lane; a rank that loses the group sends its reason there before it closes its bulk connections, so a peer
// whose bulk transfer breaks finds the cause and not only "connection closed".
class NoticeBoard {
 public:
  explicit NoticeBoard(GroupContext& group) : group_(group) {}

  // Posts the receives. Called once, before the first op.
  void watch();

  // Sends `why` to every peer and waits, briefly, for it to leave. Once, after watch(). Never throws: it is a courtesy.
  void send(const std::string& why, uint32_t sequence);

  // The text that `peer` said, waiting up to `patience`; empty when it said nothing. Never throws.
  std::string read(int peer, std::chrono::milliseconds patience);

  // The text of the first peer to say anything, listening to all of them for up to `patience`. Never throws.
  std::string first(std::chrono::milliseconds patience);

 private:
  GroupContext& group_;
  struct Watch {
    BufferPool::Buffer buffer;
    std::unique_ptr<Transfer> receiving;
  };
  std::vector<Watch> watches_;
  // Taken before the first op: the buffers of a failed one go back to the pool while its transfers still use them.
  BufferPool::Buffer out_;
  std::vector<std::unique_ptr<Transfer>> sending_;
};

}  // namespace lowcomm

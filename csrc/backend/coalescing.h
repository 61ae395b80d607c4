#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "backend/group.h"
#include "backend/inner_work.h"

namespace lowcomm {

// Coalescing blocks: inside a block ops are checked and put off. At its end collectives start in the order of their
// calls; then the device work that sends need is enqueued, and receives are posted before sends (a rank that sends
// first runs the exchange half-duplex). One implementation serves both devices.
//
// If the body of a block raises, torch keeps its own list of the block for ever, and every later op of the group only
// joins that list. So inside a block the first error is not raised but kept, later ops are not begun, and the block's
// end throws it; only ops that a thread waited for inside the block have started. (Errors that only the inner backend
// finds appear when its op starts: earlier ops have started then.)
//
// Threads: one caller at a time, as any c10d backend.
class Coalescing {
 public:
  // A message that is put off.
  struct Message {
    bool receive = false;
    bool device = false;
    std::function<void()> prepare = {};  // before anything of the block is issued; may be empty
  };

  // Both outlive this.
  Coalescing(Group& group, InnerBackend& inner);
  ~Coalescing();

  bool open() const { return block_ != nullptr; }

  // Opens a block. One that is still open was left by an exception in its body, and ends with an error.
  void begin();

  // Issues what the open block holds, as one Work. Throws the block's first error; then nothing is left of it.
  WorkPtr end();

  // Ends the open block, if there is one, with an error for what it put off.
  void leave(const std::string& why);

  // Issues an op. Inside a block nothing is raised: the block's end throws the first error, and so does the Work that
  // stands for the op.
  WorkPtr run(c10d::OpType op, const std::function<WorkPtr()>& issue);

  // Puts off a message, inside a block; outside it is issued now.
  WorkPtr putOffMessage(c10d::OpType op, Message message, std::function<WorkPtr()> issue);

  // Puts off a collective of the open block that was checked and has its number: `start` runs at the block's end, or
  // when a thread waits for the op or for a later one; otherwise `cancel` gets the error that ended the block.
  WorkPtr putOff(c10d::OpType op, uint64_t sequence, std::function<WorkPtr()> start,
                 std::function<void(std::exception_ptr)> cancel = {});

  // Starts the collectives that were put off so far.
  void startPutOff();

  // The first of `count` numbers of ops that run at once, also inside a block: after what was put off in it.
  uint64_t takeNumbers(uint64_t count);

 private:
  struct Block;
  void startAll(Block& block);
  void cancelAll(Block& block, const std::exception_ptr& error);
  bool keepsError(const std::weak_ptr<Block>& block, const std::exception_ptr& error);
  c10::intrusive_ptr<GroupWork> standIn(c10d::OpType op, std::function<WorkPtr()> start);

  Group& group_;
  InnerBackend& inner_;
  std::shared_ptr<Block> block_;  // not null inside a block
};

}  // namespace lowcomm

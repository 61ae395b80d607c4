#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
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

// Word of an op that is given up.
struct OpNotice {
  uint32_t sequence = 0;
  Cancellation::Cause cause;
};

// Words of ops that ranks give up, over the control lane. Thread-safe.
class OpNotices {
 public:
  // `received` gets each message, and `spoilt` the reason if a peer sent an invalid one, after which no more are read
  // from it: on a thread of this object's own.
  using Handler = std::function<void(int peer, const OpNotice& notice)>;
  using Spoilt = std::function<void(int peer, const std::string& why)>;
  OpNotices(GroupContext& group, Handler received, Spoilt spoilt);
  ~OpNotices();  // as stop()

  // From now on `received` and `spoilt` are called.
  void start();

  OpNotices(const OpNotices&) = delete;
  OpNotices& operator=(const OpNotices&) = delete;

  // Tells every peer. Does not wait.
  void tell(const OpNotice& notice);

  // Waits until what was told has come to all peers that can hear it, or `enough`, which is asked again and again with
  // the time that this has taken, says so.
  void settle(const std::function<bool(std::chrono::milliseconds)>& enough);

  // Ends the thread; the control lane must have been cancelled. Any number of times.
  void stop();

 private:
  struct Told {
    BufferPool::Buffer frame;
    std::vector<std::unique_ptr<Transfer>> transfers;
  };
  struct Coming {
    BufferPool::Buffer buffer;
    std::unique_ptr<Transfer> receiving;  // null: nothing comes any more
  };
  void post(int peer);
  void receive();
  void take(int peer);

  GroupContext& group_;
  const Handler received_;
  const Spoilt spoilt_;
  BufferPool buffers_;
  std::vector<Coming> coming_;  // by rank; the thread's
  std::mutex telling_;
  std::deque<Told> told_;
  std::mutex mutex_;  // of what is below
  std::condition_variable changed_;
  std::deque<int> come_;  // peers whose receives have ended
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lowcomm

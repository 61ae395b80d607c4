#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collective/context.h"
#include "collective/message_flow.h"
#include "transport/transport.h"
#include "wire/key_values.h"

namespace lowcomm {

// A receiver tells this to the sender of a message, once it has posted its receives (FORMAT.md, "Point to point").
struct Announcement {
  MessageFlow flow;
  uint32_t frames = 0;    // receives posted
  KeyValues description;  // of the message that it expects
  size_t bytes = 0;       // of the frame that brought it

  std::string text() const;
  // Throws WireError.
  static Announcement parse(std::string_view text);
};

// A rank tells this to another when it takes no more part in what both had under way on a block of channels (FORMAT.md,
// "Withdrawals").
struct Withdrawal {
  uint32_t block = 0;
  uint32_t period = 0;  // how often the block's messages have begun anew
  std::string why;      // the first cause, kMaxErrorText bytes at most

  std::string text() const;
  // Whether a text is one of these, and not an announcement's.
  static bool is(std::string_view text);
  // Throws WireError.
  static Withdrawal parse(std::string_view text);
};

// A group's announcements: those that this rank makes, and, from each peer that it has sent to or withdrawn from, those
// it hears; withdrawals among them, in order. They travel over the control lane, where they never queue behind frames.
// Thread-safe.
class AnnouncementBoard {
 public:
  // Called on a thread of the board's own, of one peer in the order in which it announced: `heard` with an
  // announcement, `withdrawn` with a withdrawal; `lost` once, when there will be no more.
  using Heard = std::function<void(int peer, Announcement announcement)>;
  using HeardWithdrawal = std::function<void(int peer, const Withdrawal& withdrawal)>;
  using Lost = std::function<void(int peer, const TransportError& why)>;
  AnnouncementBoard(GroupContext& group, Heard heard, HeardWithdrawal withdrawn, Lost lost);
  ~AnnouncementBoard();  // as stop()

  // Bytes of an announcement's payload at most.
  static constexpr size_t kMaxText = 4096;
  // Announcements that may travel at a time from one peer: without receives posted ahead each would cost a round trip.
  static constexpr size_t kAhead = 32;

  // An announcement under way; it has arrived when frames of its message have.
  struct Delivery {
    BufferPool::Buffer buffer;
    std::unique_ptr<Transfer> transfer;
    size_t bytes = 0;
  };

  // Tells `peer`. Throws TransportError.
  Delivery tell(int peer, const Announcement& announcement, uint32_t sequence) {
    return tell(peer, announcement.text(), sequence);
  }
  Delivery tell(int peer, const Withdrawal& withdrawal) { return tell(peer, withdrawal.text(), withdrawal.period); }

  // Hears `peer` from now on; any number of times.
  void listen(int peer);

  // Ends the threads. The control lane must have been cancelled, or they go on.
  void stop();

 private:
  struct PostedReceive {
    BufferPool::Buffer buffer;
    std::unique_ptr<Transfer> receiving;
  };
  using PostedReceives = std::array<PostedReceive, kAhead>;
  Delivery tell(int peer, const std::string& text, uint32_t sequence);
  void hear(int peer);

  GroupContext& group_;
  const Heard heard_;
  const HeardWithdrawal withdrawn_;
  const Lost lost_;
  BufferPool buffers_;
  std::mutex mutex_;
  std::map<int, std::thread> threads_;
  std::list<PostedReceives> receives_;  // one a thread; kept to the end: the lane may write to them that long
};

}  // namespace lowcomm

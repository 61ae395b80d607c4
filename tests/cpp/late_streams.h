#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace lowcomm::fake_device {

// The streams of a device that does nothing before it must: what is enqueued on a stream is done when the host waits
// for it, and then what comes before it on its stream, and what that waited for on others. So who reads a tensor that
// it has not waited for gets other values than those that are to be written there.
class LateStreams {
 public:
  // Enqueues `work`, which must not throw, and holds what it uses. Done at once unless the device is late.
  void enqueue(const c10::Stream& stream, std::function<void()> work);

  // Events, by their handles: what is enqueued on the stream by now.
  void record(void* event, const c10::Stream& stream);
  void block(void* event, const c10::Stream& stream);  // what is enqueued on the stream later comes after the event
  void synchronize(void* event);

  void synchronize(const c10::Stream& stream);
  void synchronizeAll();

  bool isLate() const { return late_; }
  void setLate(bool late);

 private:
  using Key = std::pair<int, c10::StreamId>;
  struct Mark {
    Key stream;
    size_t end;  // of its tasks, counted from the first one ever
  };
  struct Tasks {
    std::deque<std::function<void()>> waiting;
    size_t done = 0;
    size_t end() const { return done + waiting.size(); }
  };

  static Key keyOf(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  void doUntil(const Mark& mark);
  void waitFor(const std::function<std::deque<Mark>()>& marks);

  bool late_ = false;
  std::recursive_mutex mutex_;  // a task of one stream may wait for another's
  std::map<Key, Tasks> streams_;
  std::map<void*, Mark> events_;
  std::deque<std::function<void()>> done_;  // until the lock is free: what they hold may be Python's to let go of
};

LateStreams& lateStreams();

}  // namespace lowcomm::fake_device

#include "late_streams.h"

namespace lowcomm::fake_device {

void LateStreams::enqueue(const c10::Stream& stream, std::function<void()> work) {
  if (!late_) return work();
  std::lock_guard lock(mutex_);
  streams_[keyOf(stream)].waiting.push_back(std::move(work));
}

void LateStreams::record(void* event, const c10::Stream& stream) {
  std::lock_guard lock(mutex_);
  events_[event] = {keyOf(stream), streams_[keyOf(stream)].end()};
}

void LateStreams::block(void* event, const c10::Stream& stream) {
  std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found != events_.end()) enqueue(stream, [this, mark = found->second] { doUntil(mark); });
}

void LateStreams::synchronize(void* event) {
  waitFor([&]() -> std::deque<Mark> {
    const auto found = events_.find(event);
    return found == events_.end() ? std::deque<Mark>{} : std::deque<Mark>{found->second};
  });
}

void LateStreams::synchronize(const c10::Stream& stream) {
  waitFor([&] { return std::deque<Mark>{{keyOf(stream), streams_[keyOf(stream)].end()}}; });
}

void LateStreams::synchronizeAll() {
  waitFor([&] {
    std::deque<Mark> all;
    for (const auto& [key, tasks] : streams_)
      all.push_back({key, tasks.end()});
    return all;
  });
}

void LateStreams::waitFor(const std::function<std::deque<Mark>()>& marks) {
  std::deque<std::function<void()>> done;
  std::lock_guard lock(mutex_);
  for (const Mark& mark : marks())
    doUntil(mark);
  done.swap(done_);
}

void LateStreams::setLate(bool late) {
  synchronizeAll();
  late_ = late;
}

void LateStreams::doUntil(const Mark& mark) {
  Tasks& tasks = streams_[mark.stream];
  while (tasks.done < mark.end) {
    done_.push_back(std::move(tasks.waiting.front()));
    tasks.waiting.pop_front();
    ++tasks.done;
    done_.back()();
  }
}

LateStreams& lateStreams() {
  static auto* streams = new LateStreams;  // threads of torch's use it until the process ends
  return *streams;
}

}  // namespace lowcomm::fake_device

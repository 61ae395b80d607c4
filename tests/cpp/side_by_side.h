#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace lowcomm::test {

// part(0) ... part(count − 1), each on a thread of its own, till all have ended.
inline void sideBySide(size_t count, const std::function<void(int i)>& part) {
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < count; ++i)
    threads.emplace_back(part, static_cast<int>(i));
}

}  // namespace lowcomm::test

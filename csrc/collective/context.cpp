#include "collective/context.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <new>
#include <numeric>
#include <tuple>

#include "collective/plan.h"

namespace lowcomm {

GroupContext::GroupContext(Transport& transport, GroupConfig config)
    : transport(transport),
      name(std::move(config.group)),
      global_ranks(std::move(config.global_ranks)),
      epoch(config.epoch),
      chunk_bytes(config.chunk_bytes),
      connections(config.connections),
      timeout_ms(config.timeout.count()),
      frames(frameCapacity(config.chunk_bytes)),
      window(transport.size() - 1),
      links(transport.size(), config.equal_slices) {}

std::string GroupContext::rankName(int rank) const {
  if (rank < 0) return "any rank";
  std::string name = "rank " + std::to_string(rank);
  if (rank >= 0 && static_cast<size_t>(rank) < global_ranks.size()) {
    name += " (global " + std::to_string(global_ranks[rank]) + ")";
  }
  return name;
}

namespace {

// Pages of their own, which go back to the system wherever they lie; a heap keeps what lies under something in use.
std::byte* newPages(size_t bytes) {
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(pages);
}

}  // namespace

BufferPool::~BufferPool() {
  for (const auto& [buffer, allocation] : all_)
    ::munmap(buffer, allocation.bytes);
}

BufferPool::Buffer BufferPool::take(size_t bytes) {
  constexpr size_t kPage = 4096;
  const size_t granule = std::max(kPage, std::bit_floor(bytes) / 4);
  if (bytes != capacity_) bytes = (bytes + granule - 1) / granule * granule;
  std::lock_guard<std::mutex> lock(mutex_);
  Idle& idle = idle_[bytes];
  idle.last_taken = ++takes_;
  const bool is_safe = !idle.buffers.empty();
  std::vector<std::byte*>& from = is_safe ? idle.buffers : idle.risky;
  if (from.empty()) {
    std::byte* const buffer = newPages(bytes);
    all_.emplace(buffer, Allocation{bytes, false});
    held_ += bytes;
    missed(bytes);
    return Buffer(buffer, Return{this, bytes});
  }
  std::byte* const buffer = from.back();
  from.pop_back();
  if (is_safe) idle_bytes_ -= bytes;
  idle.least = std::min(idle.least, idle.buffers.size());
  return Buffer(buffer, Return{this, bytes});
}

size_t BufferPool::held() {
  std::lock_guard<std::mutex> lock(mutex_);
  return held_;
}

void BufferPool::give(std::byte* buffer, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Idle& idle = idle_[bytes];
  bool& risky = all_.at(buffer).risky;
  risky |= std::uncaught_exceptions() > 0;
  if (!risky) idle_bytes_ += bytes;
  (risky ? idle.risky : idle.buffers).push_back(buffer);
}

// With the lock: a buffer had to be made, perhaps in place of one that was freed lately.
void BufferPool::missed(size_t bytes) {
  for (size_t& freed : freed_bytes_) {
    const size_t again = std::min(bytes, freed);
    freed -= again;
    bytes -= again;
    kept_ = std::min(kept_ + again, kMostKeptBytes);
  }
}

void BufferPool::trim() noexcept {
  adapt();
  // One at a time, and unmapped without the lock: a large message's would hold up those that take and give.
  for (auto [buffer, bytes] = surplus(); buffer; std::tie(buffer, bytes) = surplus())
    ::munmap(buffer, bytes);
}

// Counts an op or message that has ended, and after kLately of them lets less lie idle where all of them needed less.
void BufferPool::adapt() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (++ended_ < kLately) return;
  ended_ = 0;
  for (auto& [bytes, idle] : idle_) {
    kept_ -= std::min(kept_, idle.least * bytes);
    idle.least = idle.buffers.size();
  }
  kept_ = std::max(kept_, kKeptBytes);
  freed_bytes_ = {0, freed_bytes_[0]};
}

// A buffer that is to be freed, which the pool forgets; null: none.
std::pair<std::byte*, size_t> BufferPool::surplus() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (idle_bytes_ <= kept_) return {};
  Idle* oldest = nullptr;
  size_t bytes = 0;
  for (auto& [size, idle] : idle_) {
    if (idle.buffers.empty() || (oldest && oldest->last_taken < idle.last_taken)) continue;
    oldest = &idle;
    bytes = size;
  }
  std::byte* const buffer = oldest->buffers.back();
  oldest->buffers.pop_back();
  oldest->least = std::min(oldest->least, oldest->buffers.size());
  all_.erase(buffer);
  held_ -= bytes;
  idle_bytes_ -= bytes;
  freed_bytes_[0] += bytes;
  return {buffer, bytes};
}

bool LeavingFrames::take(std::vector<OutgoingFrame>& frames) {
  std::map<int, size_t> more;
  for (const OutgoingFrame& frame : frames) {
    for (const OutgoingFrame::Way& way : frame.sending)
      if ((more[way.peer] += BufferPool::span(frame.buffer).size()) > kMost) return false;
  }
  std::vector<Leaving> arrived;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  forget(arrived);
  for (const auto& [peer, bytes] : more) {
    if (is_closing_ || peers_[peer].bytes + bytes > kMost) return false;
  }
  for (OutgoingFrame& frame : frames) {
    const size_t bytes = frame.sending.empty() ? 0 : BufferPool::span(frame.buffer).size();
    const auto buffer = std::make_shared<BufferPool::Buffer>(std::move(frame.buffer));
    for (OutgoingFrame::Way& way : frame.sending) {
      ToPeer& to = peers_[way.peer];
      to.frames.push_back({std::move(way.transfer), buffer, bytes});
      to.bytes += bytes;
    }
  }
  frames.clear();
  return true;
}

// With the lock: moves what has arrived, or is lost, to `arrived`.
void LeavingFrames::forget(std::vector<Leaving>& arrived) {
  for (auto& [peer, to] : peers_) {
    for (; !to.frames.empty() && isOver(*to.frames.front().transfer); to.frames.pop_front()) {
      to.bytes -= to.frames.front().bytes;
      arrived.push_back(std::move(to.frames.front()));
    }
  }
}

void LeavingFrames::settle(OpContext& op) {
  for (const auto& [peer, to] : copy()) {
    for (const Leaving& frame : to.frames)
      op.wait(*frame.transfer, peer, "sending a frame of an op before");
  }
}

std::map<int, LeavingFrames::ToPeer> LeavingFrames::copy() {
  std::lock_guard<std::mutex> lock(mutex_);
  return peers_;
}

std::vector<int> LeavingFrames::flush(std::chrono::milliseconds patience) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  auto end = OpContext::Clock::now() + patience;
  std::vector<int> without;
  for (const auto& [peer, to] : copy()) {
    const bool all = std::all_of(to.frames.begin(), to.frames.end(), [&](const Leaving& frame) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - OpContext::Clock::now());
      if (isOver(*frame.transfer)) return true;
      if (left.count() <= 0 || !isOver(*frame.transfer, left)) return false;
      end = OpContext::Clock::now() + patience;  // the link moves
      return true;
    });
    if (!all) without.push_back(peer);
  }
  return without;
}

namespace {

constexpr double kWorthIt = 1.1;  // times the rate before
constexpr std::chrono::microseconds kShort{500};

}  // namespace

void SendWindow::waited(std::chrono::nanoseconds time, uint64_t bytes) {
  times_[seen_++] = time;
  bytes_ += bytes;
  if (seen_ < kSeen) return;
  const auto sum = std::accumulate(times_.begin(), times_.end(), std::chrono::nanoseconds{0});
  const double rate = static_cast<double>(bytes_) / static_cast<double>(std::max<int64_t>(sum.count(), 1));
  seen_ = 0;
  bytes_ = 0;
  if (settling_) {
    settling_ = false;
  } else if (tried_from_ > 0) {
    judge(rate);
  } else if (rest_ > 0) {
    --rest_;
  } else if (rounds_ < kMost && idle(sum)) {
    tried_from_ = rounds_;
    rate_before_ = rate;
    rounds_ = std::min(2 * rounds_, kMost);
    settling_ = true;
  }
}

bool SendWindow::idle(std::chrono::nanoseconds sum) {
  if (sum < kSeen * kShort) return false;  // a fast link, or one that waits for the codec
  // The lower quartile is about the time of a frame on the link: that many of them fill less than half of the waits.
  std::nth_element(times_.begin(), times_.begin() + kSeen / 4, times_.end());
  return 2 * kSeen * times_[kSeen / 4] < sum;
}

void SendWindow::judge(double rate) {
  if (rate >= kWorthIt * rate_before_) {
    next_rest_ = kRest;
  } else {
    rounds_ = tried_from_;
    rest_ = next_rest_;
    next_rest_ = std::min<size_t>(2 * next_rest_, 1024);
  }
  tried_from_ = 0;
}

}  // namespace lowcomm

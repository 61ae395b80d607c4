#include "engine/notice.h"

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "messages/announcement.h"
#include "wire/frame.h"
#include "wire/key_values.h"

namespace lowcomm {
namespace {

constexpr uint32_t kTag = 1, kWordTag = 4;  // of the control lane: announcements have 3, ops 0 and 2
constexpr size_t kMaxText = 4096, kMaxWord = 2 * kMaxErrorText + 64;  // every byte of a reason may be escaped
constexpr std::chrono::milliseconds kSendPatience{200}, kTurn{50}, kPoll{1};

}  // namespace

void NoticeBoard::watch() {
  out_ = group_.frames.take();
  watches_.resize(group_.size());
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    watches_[peer].buffer = group_.frames.take();
    try {
      watches_[peer].receiving =
          group_.transport.irecv(Lane::control, peer, kTag, group_.frames.span(watches_[peer].buffer));
    } catch (const TransportError&) {
      // The peer has made its group and left it already: the first op with it says so.
    }
  }
}

void NoticeBoard::send(const std::string& why, uint32_t sequence) {
  if (!sending_.empty()) return;
  FrameHeader header;
  header.kind = FrameKind::error;
  header.sequence = sequence;
  header.epoch = group_.epoch;
  const std::span<std::byte> frame(out_.get(), sealText(out_.get(), header, why.substr(0, kMaxText)));
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    try {
      sending_.push_back(group_.transport.isend(Lane::control, peer, kTag, frame));
    } catch (const TransportError&) {
      // The peer that is gone needs no notice.
    }
  }
  const auto deadline = OpContext::Clock::now() + kSendPatience;
  for (auto& transfer : sending_) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - OpContext::Clock::now());
    isOver(*transfer, std::max(left, std::chrono::milliseconds(0)));
  }
}

std::string NoticeBoard::read(int peer, std::chrono::milliseconds patience) {
  if (peer < 0 || peer >= static_cast<int>(watches_.size()) || !watches_[peer].receiving) return "";
  try {
    watches_[peer].receiving->wait(patience);
    auto bytes = group_.frames.span(watches_[peer].buffer);
    FrameHeader header = openFrame(bytes);
    if (header.kind != FrameKind::error) return "";
    if (header.epoch != group_.epoch) {
      return "it gave a group of another epoch up: expected " + std::to_string(group_.epoch) + ", got " +
             std::to_string(header.epoch);
    }
    auto text = framePayload(bytes, header);
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  } catch (const std::runtime_error&) {
    return "";
  }
}

std::string NoticeBoard::first(std::chrono::milliseconds patience) {
  const auto deadline = OpContext::Clock::now() + patience;
  for (bool any = true; any && OpContext::Clock::now() < deadline;) {
    any = false;
    for (int peer = 0; peer < group_.size(); ++peer) {
      Transfer* receiving = watches_[peer].receiving.get();
      if (!receiving) continue;
      if (!isOver(*receiving, kPoll)) {
        any = true;
        continue;
      }
      std::string said = read(peer, std::chrono::milliseconds(0));
      if (!said.empty()) return said;
    }
  }
  return "";
}

namespace {

std::string textOf(const OpNotice& word) {
  return KeyValues{{{"by", std::to_string(word.cause.by)}, {"why", word.cause.why}}}.text();
}

// Throws WireError.
OpNotice parse(const GroupContext& group, std::span<const std::byte> frame) {
  const ControlText said = openControlText(frame, group.epoch);
  const KeyValues text = KeyValues::parse(said.text);
  if (text.fields.size() != 2 || text.fields[0].first != "by" || text.fields[1].first != "why")
    throw WireError("word of an op that is given up: expected the fields 'by' and 'why', got others");
  const std::string& by = text.fields[0].second;
  int rank = -1;
  const auto read = std::from_chars(by.data(), by.data() + by.size(), rank);
  if (read.ec != std::errc() || read.ptr != by.data() + by.size() || rank < 0 || rank >= group.size()) {
    throw WireError("word of an op that is given up: expected a rank of 0 ... " + std::to_string(group.size() - 1) +
                    ", got '" + by + "'");
  }
  return {said.sequence, {rank, beginningOf(text.fields[1].second, kMaxErrorText)}};
}

}  // namespace

OpNotices::OpNotices(GroupContext& group, Handler received, Spoilt spoilt)
    : group_(group),
      received_(std::move(received)),
      spoilt_(std::move(spoilt)),
      buffers_(kFrameHeaderBytes + kMaxWord),
      coming_(group.size()) {
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer != group.rank()) post(peer);
  }
}

void OpNotices::start() {
  thread_ = std::thread([this] { receive(); });
}

OpNotices::~OpNotices() {
  stop();
}

void OpNotices::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void OpNotices::post(int peer) {
  Coming& coming = coming_[peer];
  if (!coming.buffer) coming.buffer = buffers_.take();
  const auto then = [this, peer] {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      come_.push_back(peer);
    }
    changed_.notify_all();
  };
  try {
    coming.receiving = group_.transport.irecv(Lane::control, peer, kWordTag, BufferPool::span(coming.buffer), then);
  } catch (const TransportError&) {  // the first op with the peer says so
    coming.receiving = nullptr;
  }
}

void OpNotices::receive() {
  for (;;) {
    int peer;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !come_.empty(); });
      if (stopping_) return;
      peer = come_.front();
      come_.pop_front();
    }
    take(peer);
  }
}

void OpNotices::take(int peer) {
  OpNotice word;
  try {
    coming_[peer].receiving->wait(std::chrono::milliseconds(0));
    word = parse(group_, BufferPool::span(coming_[peer].buffer));
  } catch (const TransportError&) {
    return;  // the peer is gone, or the lane
  } catch (const WireError& error) {
    return spoilt_(peer, error.what());
  }
  received_(peer, word);
  post(peer);
}

void OpNotices::tell(const OpNotice& notice) {
  FrameHeader header;
  header.kind = FrameKind::control;
  header.sequence = notice.sequence;
  header.epoch = group_.epoch;
  std::lock_guard<std::mutex> telling(telling_);
  std::erase_if(told_, [](const Told& told) {
    return std::all_of(told.transfers.begin(), told.transfers.end(),
                       [](const auto& transfer) { return isOver(*transfer); });
  });
  Told& told = told_.emplace_back(Told{buffers_.take(), {}});
  const size_t bytes = sealText(told.frame.get(), header, textOf(notice));
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    try {
      told.transfers.push_back(
          group_.transport.isend(Lane::control, peer, kWordTag, BufferPool::span(told.frame).first(bytes)));
    } catch (const TransportError&) {
      // The peer that is gone needs no notice.
    }
  }
}

void OpNotices::settle(const std::function<bool(std::chrono::milliseconds)>& enough) {
  const auto start = OpContext::Clock::now();
  for (;;) {
    Told told;
    {
      std::lock_guard<std::mutex> telling(telling_);
      if (told_.empty()) return;
      told = std::move(told_.front());
      told_.pop_front();
    }
    bool all = true, is_enough = false;
    for (const auto& transfer : told.transfers) {
      while (!isOver(*transfer, kTurn) && !is_enough)
        is_enough = enough(std::chrono::duration_cast<std::chrono::milliseconds>(OpContext::Clock::now() - start));
      all &= !is_enough;
    }
    if (all) continue;
    std::lock_guard<std::mutex> telling(telling_);
    return told_.push_back(std::move(told));  // it is still under way
  }
}

}  // namespace lowcomm

#include "engine/notice.h"

#include <algorithm>

#include "wire/frame.h"

namespace lowcomm {
namespace {

constexpr uint32_t kTag = 1;  // of the control lane: announcements have 3, ops 0 and 2
constexpr size_t kMaxText = 4096;
constexpr std::chrono::milliseconds kSendPatience{200}, kPoll{1};

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

}  // namespace lowcomm

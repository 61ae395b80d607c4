#include "engine/notice.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>

#include "wire/frame.h"

namespace lowcomm {
namespace {

constexpr uint32_t kTag = 1;  // agree() talks on 0
constexpr size_t kMaxText = 4096;
constexpr std::chrono::milliseconds kSendPatience{200};

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
  header.payload_bytes = static_cast<uint32_t>(std::min(why.size(), kMaxText));
  std::memcpy(out_.get() + kFrameHeaderBytes, why.data(), header.payload_bytes);
  const std::span<std::byte> frame(out_.get(), kFrameHeaderBytes + header.payload_bytes);
  sealFrame(frame, header);
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
    try {
      transfer->wait(std::max(left, std::chrono::milliseconds(1)));  // gloo takes 0 for no deadline
    } catch (const TransportError&) {
    }
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
  // All at once: a wait that times out closes every connection of a lane (gloo), those of peers who have spoken too.
  std::mutex mutex;
  std::string said;
  std::vector<std::thread> listening;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    listening.emplace_back([&, peer] {
      const std::string text = read(peer, patience);
      std::lock_guard<std::mutex> lock(mutex);
      if (said.empty()) said = text;
    });
  }
  for (auto& thread : listening)
    thread.join();
  return said;
}

}  // namespace lowcomm

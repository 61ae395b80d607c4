#include "messages/announcement.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "wire/frame.h"

namespace lowcomm {

namespace {

constexpr uint32_t kTag = 3;  // of the control lane: agreements have 0, notices 1, frame counts 2

// Frames that a message may have: 2^28 of them carry more than any memory holds.
constexpr uint32_t kMostFrames = 1u << 28;

// A peer may announce nothing for as long as the group lives: only the lane's end breaks the wait.
constexpr std::chrono::hours kForEver{24 * 365};

uint32_t numberIn(const std::string& field, std::string_view value) {
  uint32_t number = 0;
  const char* end = value.data() + value.size();
  const auto [at, error] = std::from_chars(value.data(), end, number);
  if (value.empty() || at != end || error != std::errc{}) {
    throw WireError("announcement: expected a number in '" + field + "', got '" + std::string(value) + "'");
  }
  return number;
}

MessageFlow flowIn(const std::string& text) {
  const std::string_view tag = "tag ", channel = "channel ";
  const bool tagged = text.starts_with(tag);
  if (!tagged && !text.starts_with(channel)) {
    throw WireError("announcement: expected a flow 'tag N' or 'channel N', got '" + text + "'");
  }
  const MessageFlow flow{tagged ? MessageFlow::Kind::tag : MessageFlow::Kind::channel,
                         numberIn("flow", std::string_view(text).substr(tagged ? tag.size() : channel.size()))};
  const uint32_t flows = tagged ? kP2pTags : kChannels;
  if (flow.number >= flows) {
    throw WireError("announcement: expected a number below " + std::to_string(flows) + ", got '" + text + "'");
  }
  return flow;
}

}  // namespace

std::string Announcement::text() const {
  KeyValues all{{{"flow", flow.name()}, {"frames", std::to_string(frames)}, {"first tag", std::to_string(first_tag)}}};
  all.fields.insert(all.fields.end(), description.fields.begin(), description.fields.end());
  return all.text();
}

Announcement Announcement::parse(std::string_view text) {
  KeyValues all = KeyValues::parse(text);
  if (all.fields.size() < 3 || all.fields[0].first != "flow" || all.fields[1].first != "frames" ||
      all.fields[2].first != "first tag") {
    throw WireError("announcement: expected the fields 'flow', 'frames' and 'first tag' first, got '" +
                    std::string(text) + "'");
  }
  Announcement announcement;
  announcement.flow = flowIn(all.fields[0].second);
  announcement.frames = numberIn("frames", all.fields[1].second);
  if (announcement.frames > kMostFrames) {
    throw WireError("announcement: expected at most " + std::to_string(kMostFrames) + " frames, got '" +
                    std::string(text) + "'");
  }
  announcement.first_tag = numberIn("first tag", all.fields[2].second);
  announcement.description.fields.assign(all.fields.begin() + 3, all.fields.end());
  return announcement;
}

std::string Withdrawal::text() const {
  return KeyValues{{{"withdrawn", std::to_string(block)}, {"period", std::to_string(period)}, {"why", why}}}.text();
}

std::string AnySourceMessage::text() const {
  KeyValues all;
  if (offer) {
    all.fields = {{"offered", flow.name()}, {"announced", std::to_string(*offer)}};
  } else {
    all.fields = {{"wanted", flow.name()}};
  }
  return all.text();
}

AnySourceMessage AnySourceMessage::parse(std::string_view text) {
  const KeyValues all = KeyValues::parse(text);
  const bool offers = text.starts_with("offered=");
  if (all.fields.size() != (offers ? 2 : 1) || (offers && all.fields[1].first != "announced")) {
    throw WireError("receive from any rank: expected the field 'wanted', or 'offered' and 'announced', got '" +
                    std::string(text) + "'");
  }
  AnySourceMessage message{flowIn(all.fields[0].second), {}};
  if (message.flow.channel())
    throw WireError("receive from any rank: expected a tag, got '" + message.flow.name() + "'");
  if (offers) message.offer = numberIn("announced", all.fields[1].second);
  return message;
}

Withdrawal Withdrawal::parse(std::string_view text) {
  const KeyValues all = KeyValues::parse(text);
  if (all.fields.size() != 3 || all.fields[0].first != "withdrawn" || all.fields[1].first != "period" ||
      all.fields[2].first != "why") {
    throw WireError("withdrawal: expected the fields 'withdrawn', 'period' and 'why', got '" + std::string(text) + "'");
  }
  Withdrawal withdrawal{numberIn("withdrawn", all.fields[0].second), numberIn("period", all.fields[1].second),
                        beginningOf(all.fields[2].second, kMaxErrorText)};
  if (withdrawal.block >= kBlocks) {
    throw WireError("withdrawal: expected a block below " + std::to_string(kBlocks) + ", got '" + std::string(text) +
                    "'");
  }
  return withdrawal;
}

AnnouncementBoard::AnnouncementBoard(GroupContext& group, Handlers handlers)
    : group_(group), handlers_(std::move(handlers)), buffers_(kFrameHeaderBytes + kMaxText) {}

AnnouncementBoard::~AnnouncementBoard() {
  stop();
}

AnnouncementBoard::Delivery AnnouncementBoard::tell(int peer, const std::string& text, uint32_t sequence) {
  if (text.size() > kMaxText) {
    throw ValueError("announcement: expected at most " + std::to_string(kMaxText) + " bytes, got " +
                     std::to_string(text.size()));
  }
  FrameHeader header;
  header.kind = FrameKind::control;
  header.sequence = sequence;
  header.epoch = group_.epoch;
  Delivery sent{buffers_.take(), nullptr, 0};
  sent.bytes = sealText(sent.buffer.get(), header, text);
  sent.transfer = group_.transport.isend(Lane::control, peer, kTag, BufferPool::span(sent.buffer).first(sent.bytes));
  return sent;
}

void AnnouncementBoard::listen(int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::thread& thread = threads_[peer];
  if (!thread.joinable()) thread = std::thread([this, peer] { receiveFrom(peer); });
}

void AnnouncementBoard::receiveFrom(int peer) {
  PostedReceives* receives;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    receives = &receives_.emplace_back();
  }
  PostedReceives& posted = *receives;
  // A peer that has left can be posted no receive; those that were posted may hold what it sent before.
  std::optional<TransportError> left;
  const auto post = [&](PostedReceive& one) {
    one.receiving.reset();
    try {
      if (!left) one.receiving = group_.transport.irecv(Lane::control, peer, kTag, BufferPool::span(one.buffer));
    } catch (const TransportError& error) {
      left = error;
    }
  };
  try {
    for (PostedReceive& one : posted) {
      one.buffer = buffers_.take();
      post(one);
    }
    for (size_t i = 0;; i = (i + 1) % kAhead) {
      if (!posted[i].receiving) throw *left;
      posted[i].receiving->wait(kForEver);
      const std::string_view text = openControlText(BufferPool::span(posted[i].buffer), group_.epoch).text;
      const std::string_view first = text.substr(0, text.find('='));  // the field that tells messages apart
      if (first == "withdrawn") {
        handlers_.withdrawal(peer, Withdrawal::parse(text));
      } else if (first == "wanted" || first == "offered") {
        handlers_.any_source(peer, AnySourceMessage::parse(text));
      } else {
        Announcement announcement = Announcement::parse(text);
        announcement.bytes = kFrameHeaderBytes + text.size();
        handlers_.announcement(peer, std::move(announcement));
      }
      post(posted[i]);
    }
  } catch (const TransportError& error) {
    handlers_.lost(peer, error);
  } catch (const std::exception& error) {  // what came is no announcement, or memory is out
    handlers_.lost(peer, TransportError(TransportError::Kind::closed, peer, error.what()));
  }
}

ControlText openControlText(std::span<const std::byte> frame, uint32_t epoch) {
  const FrameHeader got = openFrame(frame);
  FrameHeader want;
  want.kind = FrameKind::control;
  want.sequence = got.sequence;
  want.epoch = epoch;
  want.payload_bytes = got.payload_bytes;
  expectFrame(got, want);
  const auto payload = framePayload(frame, got);
  return {got.sequence, {reinterpret_cast<const char*>(payload.data()), payload.size()}};
}

void AnnouncementBoard::stop() {
  std::map<int, std::thread> threads;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    threads.swap(threads_);
  }
  for (auto& [peer, thread] : threads)
    if (thread.joinable()) thread.join();
}

std::string MessageFlow::name() const {
  return (channel() ? "channel " : "tag ") + std::to_string(number);
}

uint32_t MessageTags::ofFrame(size_t k, int connections, uint32_t first_tag) {
  const uint32_t turns = std::min(static_cast<uint32_t>(connections), kOpTags);
  return first_tag + static_cast<uint32_t>((k + first_tag / (2 * kOpTags)) % turns);
}

bool MessageTags::belongs(uint32_t first_tag, int rank, int peer) {
  if (first_tag < kFirstMessageTag || first_tag >= kEndOfMessageTags || first_tag % kOpTags != 0) return false;
  return (first_tag / kOpTags) % 2 == (rank > peer ? 1 : 0);
}

uint32_t SenderNumbers::next(const MessageFlow& flow) {
  auto known = counted_.find(flow);
  if (known == counted_.end()) {
    if (!flow.channel() && tags_ == kCountedTags) return kSharedNumber | (shared_ = numberAfter(shared_));
    tags_ += !flow.channel();
    known = counted_.emplace(flow, 0).first;
  }
  return known->second = numberAfter(known->second);
}

uint32_t ReceiverNumbers::last(const MessageFlow& flow) const {
  const auto known = counted_.find(flow);
  return known == counted_.end() ? 0 : known->second;
}

bool ReceiverNumbers::take(uint32_t number) {
  number &= ~kSharedNumber;
  // Numbers come around after 2^31: one from the half behind is an old one.
  const uint32_t ahead = (number - whole_) & ~kSharedNumber;
  if (ahead == 0 || ahead >= kSharedNumber / 2 || !further_.insert(number).second) return false;
  while (further_.erase(numberAfter(whole_)) > 0)
    whole_ = numberAfter(whole_);
  return true;
}

}  // namespace lowcomm

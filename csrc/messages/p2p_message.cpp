#include "messages/p2p_message.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/hashes.h"
#include "transport/transport.h"

namespace lowcomm {
namespace {

bool hasSucceeded(Transfer& transfer) {
  try {
    transfer.wait(std::chrono::milliseconds(0));
  } catch (const TransportError&) {
    return false;
  }
  return true;
}

bool haveSucceeded(const std::vector<std::unique_ptr<Transfer>>& transfers) {
  return std::all_of(transfers.begin(), transfers.end(), [](const auto& one) { return hasSucceeded(*one); });
}

std::string titleOf(bool sends, const MessageKey& key) {
  std::string title = (sends ? "send " : "recv ") + std::string(key.flow.channel() ? "of " : "with ") + key.flow.name();
  for (const std::string& said : {key.edge, key.part})
    if (!said.empty()) title += ", " + said;
  return title;
}

// A list that is too long for an announcement is cut, and closed with the hash of all of it.
std::string samplesText(const std::vector<SampleKey>& samples) {
  constexpr size_t kListed = 2000;
  std::string list;
  for (const SampleKey& key : samples)
    list += (list.empty() ? "" : ",") + std::to_string(key.sample) + "@" +
            (key.version == kNotKept ? "-" : std::to_string(key.version));
  if (list.size() <= kListed) return list;
  return list.substr(0, kListed) + "... hash " + std::to_string(fnv1a(list));
}

uint32_t crcOfVersions(const std::vector<SampleKey>& samples) {
  std::vector<uint32_t> versions;
  for (const SampleKey& sample : samples)
    versions.push_back(sample.version);
  return crc32c(versions.data(), versions.size() * sizeof(uint32_t));
}

KeyValues describeMessage(const MessageKey& key, const MessagePlan& plan, const std::string& type_name,
                          const std::string& type_elements) {
  const MessageSummary summary = MessageSummary(plan).as(type_name, type_elements);
  KeyValues description{{{"dtype", summary.dtype}, {"elements", summary.elements}}};
  if (key.flow.channel()) {  // before the codec, which follows from them
    description.fields.emplace_back("samples", samplesText(key.samples));
    description.fields.emplace_back("memory", key.memory);
    if (!key.gradient.empty()) description.fields.emplace_back("gradient", key.gradient);
  }
  description.fields.emplace_back("codec", summary.codec);
  return description;
}

}  // namespace

MessagePlan planP2p(uint64_t elements, const CodecSpec& codec, DType dtype, size_t chunk_bytes) {
  return planP2p(Layout::single(elements, codec), dtype, chunk_bytes);
}

MessagePlan planP2p(const Layout& layout, DType dtype, size_t chunk_bytes) {
  MessagePlan plan = planMessage(layout, dtype, chunk_bytes);
  if (plan.frames.empty()) plan.frames.emplace_back();
  return plan;
}

P2pMessage::P2pMessage(GroupContext& group, bool sends, int peer, MessageKey key, MessagePlan plan,
                       const std::string& type_name, const std::string& type_elements)
    : op(group, titleOf(sends, key), 0),
      peer(peer),
      key(std::move(key)),
      plan(std::move(plan)),
      sends(sends),
      description_(describeMessage(this->key, this->plan, type_name, type_elements)),
      description_hash_(fnv1a(description_.text())),
      versions_crc_(crcOfVersions(this->key.samples)) {}

std::string P2pMessage::countedAs() const {
  const std::string verb = sends ? "send" : "recv";
  if (!key.flow.channel()) return verb;
  return verb + " " + (key.edge.empty() ? key.flow.name() : key.edge);
}

FrameHeader P2pMessage::header(const Frame& frame) const {
  FrameHeader header = plan.header(frame);
  header.sequence = op.sequence;
  header.epoch = op.group.epoch;
  header.key_hash = description_hash_;
  if (key.flow.channel()) {
    header.channel = key.flow.number;
    header.state_version = versions_crc_;
  }
  return header;
}

void P2pMessage::note(uint32_t expected_frames) const {
  op.note([&](OpProgress::State& state) {
    state.sequence = op.sequence;
    state.description = {{"peer", std::to_string(peer)}, {"flow", key.flow.name()}};
    state.description.insert(state.description.end(), description_.fields.begin(), description_.fields.end());
    state.frames.resize(op.group.size());
    state.frames[peer].expected = expected_frames;
    state.start();
  });
}

P2pSend::P2pSend(GroupContext& group, int peer, MessageKey key, MessagePlan plan, const std::string& type_name,
                 const std::string& type_elements)
    : P2pMessage(group, true, peer, std::move(key), std::move(plan), type_name, type_elements) {
  op.counters.raw_bytes = this->plan.rawBytes();
}

void P2pSend::encode(Source& source) {
  for (size_t k = 0; k < plan.frames.size(); ++k) {
    Outgoing frame{op.group.frames.take(roomFor(plan.frames[k].payload_bytes)), 0};
    frame.bytes = encodeFrame(source, k, frame.buffer.get());
    std::lock_guard<std::mutex> lock(mutex_);
    if (refused_) return;  // error frames have gone in place of all
    op.counters.wire_bytes += frame.bytes;
    frames_.push_back(std::move(frame));
    if (announced_) sendReady();
  }
}

// Returns the frame's bytes: those of an error frame from the first that cannot be encoded on.
size_t P2pSend::encodeFrame(Source& source, size_t k, std::byte* frame) {
  Stopwatch watch(op, Doing::encode);
  const FrameHeader now = header(plan.frames[k]);
  try {
    // A device makes the next frame while the host waits for this one.
    for (; !own_error_ && started_ < std::min(plan.frames.size(), k + 2); ++started_)
      source.start(started_);
    if (!own_error_) source.encode(k, {frame + kFrameHeaderBytes, now.payload_bytes});
  } catch (const ValueError& mistake) {
    own_error_ = std::current_exception();
    reason_ = op.refusal(mistake);
    op.counters.raw_bytes = 0;  // nothing is delivered
    op.note([&](OpProgress::State& state) { state.end(reason_); });
  }
  if (own_error_) return sealText(frame, op.header(FrameKind::error), reason_);
  const size_t bytes = kFrameHeaderBytes + now.payload_bytes;
  sealFrame({frame, bytes}, now);
  return bytes;
}

void P2pSend::announced(const Announcement& theirs) {
  std::lock_guard<std::mutex> lock(mutex_);
  announcement_bytes_ = theirs.bytes;
  announced_ = true;
  try {
    expectSameFields(description_, op.group.rank(), theirs.description, peer);
    if (theirs.frames != plan.frames.size()) {
      throw WireError("frames: expected " + std::to_string(plan.frames.size()) + ", got " +
                      std::to_string(theirs.frames));
    }
    sendReady();
  } catch (const WireError& difference) {
    const std::string why = std::string("ranks issued different messages: ") + difference.what();
    refused_ = op.refusedBecause(peer, why);
    sendErrors(theirs.frames, op.group.rankName(op.group.rank()) + ": " + why);
  }
  changed_.notify_all();
}

// With the lock, once the message is expected: hands over what is encoded.
void P2pSend::sendReady() {
  for (size_t k = transfers_.size(); k < frames_.size() && !lost_; ++k)
    start(k, {frames_[k].buffer.get(), frames_[k].bytes});
}

// With the lock: what was encoded stays behind.
void P2pSend::sendErrors(uint32_t frames, const std::string& reason) {
  frames_.clear();
  Outgoing error{op.group.frames.take(kFrameHeaderBytes + kMaxErrorText), 0};
  error.bytes = sealText(error.buffer.get(), op.header(FrameKind::error), beginningOf(reason, kMaxErrorText));
  for (uint32_t k = 0; k < frames && !lost_; ++k)
    start(k, {error.buffer.get(), error.bytes});
  frames_.push_back(std::move(error));
}

void P2pSend::start(size_t k, std::span<const std::byte> frame) {
  try {
    transfers_.push_back(op.group.transport.isend(Lane::bulk, peer, transportTag(k), frame));
  } catch (const TransportError& error) {
    lost_ = error;
  }
}

void P2pSend::withdraw(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  refused_ = op.refusedBecause(peer, why);
  frames_.clear();
  op.note([&](OpProgress::State& state) { state.end(why); });
  changed_.notify_all();
}

void P2pSend::refuse(const Announcement& theirs, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  announced_ = true;
  refused_ = op.refusedBecause(peer, why);
  sendErrors(theirs.frames, op.group.rankName(op.group.rank()) + ": " + why);
}

void P2pSend::drop(OpContext& resuming) {
  std::vector<std::unique_ptr<Transfer>> transfers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transfers.swap(transfers_);
  }
  for (const auto& transfer : transfers)
    resuming.wait(*transfer, peer, "sending what is left of a message");
  op.note([](OpProgress::State& state) { state.end("it was withdrawn"); });
}

bool P2pSend::isThrough() {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t frames = refused_ ? transfers_.size() : plan.frames.size();
  return announced_ && transfers_.size() == frames && haveSucceeded(transfers_);
}

std::exception_ptr P2pSend::error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return own_error_ ? own_error_ : refused_;
}

void P2pSend::lose(const TransportError& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!lost_) lost_ = error;
  changed_.notify_all();
}

void P2pSend::waitForReceiver() {
  ConditionWait announced(mutex_, changed_, peer, "it to be posted", [this] {
    const bool known = announced_ || refused_;
    if (!known && lost_) throw TransportError(*lost_);
    return known;
  });
  op.wait(announced, peer, "waiting for the receive of it");
  std::optional<TransportError> lost;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    op.counters.received_bytes += announcement_bytes_;
    lost = lost_;
  }
  if (lost) op.fail(peer, *lost, "starting a transfer");
}

// A channel's wait: both sides count what is under way (P2p::resume).
void P2pSend::waitForArrival() {
  std::vector<OutgoingFrame> frames = release();
  size_t bytes = 0;
  for (const OutgoingFrame& frame : frames)
    bytes += BufferPool::span(frame.buffer).size();
  for (OutgoingFrame& frame : frames) {
    for (const auto& [to, number, transfer] : frame.sending) {
      const bool may_leave = bytes <= LeavingFrames::kMost && !key.flow.channel() && !isOver(*transfer);
      if (may_leave && op.group.leaving.take(frames)) return;
      op.wait(*transfer, to, "sending a frame", number);
    }
    bytes -= BufferPool::span(frame.buffer).size();
    frame = {};
  }
}

// Its frames, which are the caller's from now on. Error frames are one buffer, sent several times.
std::vector<OutgoingFrame> P2pSend::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<OutgoingFrame> frames(frames_.size());
  for (size_t k = 0; k < transfers_.size(); ++k) {
    OutgoingFrame& frame = frames[std::min(k, frames.size() - 1)];
    frame.sending.push_back({peer, static_cast<uint32_t>(k), std::move(transfers_[k])});
  }
  for (size_t k = 0; k < frames.size(); ++k)
    frames[k].buffer = std::move(frames_[k].buffer);
  transfers_.clear();
  frames_.clear();
  return frames;
}

P2pRecv::P2pRecv(GroupContext& group, int peer, MessageKey key, MessagePlan plan, const std::string& type_name,
                 const std::string& type_elements)
    : P2pMessage(group, false, peer, std::move(key), std::move(plan), type_name, type_elements) {}

void P2pRecv::post(AnnouncementBoard& board) {
  GroupContext& group = op.group;
  const size_t frames = plan.frames.size();
  // All of one size, the last one too: a frame that comes twice is then told as such, and does not end the process.
  size_t payload = kMaxErrorText;
  for (const Frame& frame : plan.frames)
    payload = std::max<size_t>(payload, frame.payload_bytes);
  for (size_t k = 0; k < frames; ++k) {
    frames_.push_back(group.frames.take(kFrameHeaderBytes + payload));
    transfers_.push_back(group.transport.irecv(Lane::bulk, peer, transportTag(k), BufferPool::span(frames_[k])));
  }
  announcement_ = board.tell(peer, {key.flow, static_cast<uint32_t>(frames), *first_tag_, description_}, op.sequence);
  op.counters.wire_bytes += announcement_.bytes;
}

std::optional<FrameHeader> P2pRecv::firstHeader() const {
  if (frames_.empty()) return std::nullopt;
  try {
    return openFrame(BufferPool::span(frames_[0]));
  } catch (const WireError&) {
    return std::nullopt;
  }
}

std::exception_ptr P2pRecv::error() const {
  if (!refused_) return nullptr;
  try {
    op.refused(peer, *refused_);
  } catch (const PeerRefusal&) {
    return std::current_exception();
  }
}

void P2pRecv::drop(OpContext& resuming) {
  for (const auto& transfer : transfers_)
    resuming.wait(*transfer, peer, "waiting for a frame that is not taken");
  resuming.wait(*announcement_.transfer, peer, "announcing a receive");
  announcement_ = {};
  release();
  op.note([](OpProgress::State& state) { state.end("it was withdrawn"); });
}

bool P2pRecv::isThrough() {
  return haveSucceeded(transfers_) && hasSucceeded(*announcement_.transfer);
}

// Its announcement may still be on its way.
void P2pRecv::release() {
  sink_.reset();
  transfers_.clear();
  frames_.clear();
}

}  // namespace lowcomm

#include "transport/tcp/message_stream.h"

#include <utility>

#include "base/error.h"

namespace lowcomm::tcp {

void MessageStream::expectLiving() const {
  if (failed_) throw TransportError(kind_, peer_, why_);
}

std::shared_ptr<Delivery> MessageStream::send(uint32_t tag, std::span<const std::byte> data, uint64_t place,
                                              std::function<void()> then) {
  if (data.size() > kMostMessageBytes) {
    throw ValueError("tcp transport: expected a message of at most " + std::to_string(kMostMessageBytes) +
                     " bytes, got " + std::to_string(data.size()));
  }
  std::lock_guard lock(mutex_);
  expectLiving();
  return sends_.send(tag, data, place, std::move(then));
}

std::shared_ptr<Delivery> MessageStream::receive(uint32_t tag, std::span<std::byte> room, std::function<void()> then) {
  std::lock_guard lock(mutex_);
  expectLiving();
  return receives_.receive(tag, room, std::move(then));
}

std::optional<uint32_t> MessageStream::unclaimed(uint32_t first) {
  std::lock_guard lock(mutex_);
  return receives_.unclaimed(first);
}

void MessageStream::acknowledge(std::chrono::milliseconds patience) {
  constexpr uint64_t kAtOnce = 80 * 1024;  // the kernel has room for so much, but where the link is full
  std::unique_lock lock(mutex_);
  const uint64_t end = out_.end() <= written_ + kAtOnce ? out_.end() : receives_.reportedUpTo();
  if (end > written_ + kAtOnce) return;
  written_more_.wait_for(lock, patience, [&] { return failed_ || end <= written_; });
}

void MessageStream::wrote(uint64_t end) {
  written_ = end;
  written_more_.notify_all();
}

std::span<std::byte> MessageStream::room() {
  return receives_.isComing() ? receives_.room() : std::span(header_).subspan(header_have_);
}

void MessageStream::arrived(size_t bytes) {
  in_ += bytes;
  if (receives_.isComing()) return receives_.arrived(bytes);
  header_have_ += bytes;
  if (header_have_ < kRecordHeaderBytes) return;
  header_have_ = 0;
  handle(parseRecord(header_));
}

void MessageStream::handle(const Record& record) {
  switch (record.kind) {
    case Record::Kind::message:
    case Record::Kind::offered:
      return receives_.begin(record);
    case Record::Kind::body:
      return receives_.beginBody(record);
    case Record::Kind::delivered:
      return sends_.delivered(record.number);
    case Record::Kind::wanted:
      return sends_.wanted(record.number);
  }
}

bool MessageStream::failed() {
  std::lock_guard lock(mutex_);
  return failed_;
}

void MessageStream::fail(TransportError::Kind kind, const std::string& why) {
  std::lock_guard lock(mutex_);
  if (failed_) return;
  failed_ = true;
  kind_ = kind;
  why_ = why;
  sends_.fail(kind, why);
  receives_.fail(kind, why);
  out_.clear();
  written_more_.notify_all();
}

}  // namespace lowcomm::tcp

#include "codec/pieces.h"

#include <algorithm>
#include <cstring>

#include "codec/nonfinite.h"

namespace lowcomm {
namespace {

// Few enough elements that the processor's look-ahead reaches from one piece's encoding into the next one's memory.
constexpr uint64_t kPiece = 1024;

std::span<std::byte> roomFor(size_t bytes, std::vector<std::byte>& scratch) {
  if (scratch.size() < bytes) scratch.resize(bytes);
  return {scratch.data(), bytes};
}

}  // namespace

Pieces::Pieces(const Codec& codec, uint64_t count, uint64_t first, uint64_t size)
    : codec_(codec), count_(count), step_(size), at_(first), end_(first + size) {
  if (const auto head = codec.headBytes(count, DType::float32)) {
    step_ = std::min(size, std::max(kPiece, codec.granularity()));
    body_at_ = up64(*head);
    if (first > 0) {
      head_at_ = *codec.headBytes(first, DType::float32);
      body_at_ += codec.encodedBytes(first, DType::float32) - up64(head_at_);
    }
  }
  measure();
}

void Pieces::measure() {
  const uint64_t size = std::min(step_, end_ - at_);
  if (size == size_) return;
  size_ = size;
  bytes_ = codec_.encodedBytes(size_, DType::float32);
  head_ = only() ? 0 : *codec_.headBytes(size_, DType::float32);
}

void Pieces::next() {
  at_ += size_;
  head_at_ += head_;
  body_at_ += bytes_ - up64(head_);
  if (more()) measure();
}

std::span<std::byte> Pieces::room(std::span<std::byte> whole, std::vector<std::byte>& scratch) const {
  return only() ? whole : roomFor(bytes_, scratch);
}

void Pieces::put(std::span<std::byte> whole, std::span<const std::byte> own) const {
  if (only()) return;
  std::memcpy(whole.data() + head_at_, own.data(), head_);
  std::memcpy(whole.data() + body_at_, own.data() + up64(head_), bytes_ - up64(head_));
  const size_t end = head_at_ + head_;
  if (at_ + size_ == count_) std::memset(whole.data() + end, 0, up64(end) - end);
}

std::span<const std::byte> Pieces::get(std::span<const std::byte> whole, std::vector<std::byte>& scratch) const {
  if (only()) return whole;
  const std::span<std::byte> own = roomFor(bytes_, scratch);
  std::memcpy(own.data(), whole.data() + head_at_, head_);
  std::memset(own.data() + head_, 0, up64(head_) - head_);
  std::memcpy(own.data() + up64(head_), whole.data() + body_at_, bytes_ - up64(head_));
  return own;
}

}  // namespace lowcomm

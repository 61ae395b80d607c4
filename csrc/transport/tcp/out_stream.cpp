#include "transport/tcp/out_stream.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace lowcomm::tcp {

void OutStream::append(const Record& record, std::span<const std::byte> data, uint64_t place) {
  Part header{.begin = end_, .place = place};
  write(record, header.header);
  end_ += header.size;
  parts_.push_back(header);
  if (data.empty()) return;
  parts_.push_back({.begin = end_, .place = place, .size = data.size(), .data = data.data()});
  end_ += data.size();
}

std::deque<OutStream::Part>::const_iterator OutStream::partAt(uint64_t offset) const {
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), offset,
                                      [](uint64_t at, const Part& part) { return at < part.begin; });
  return after == parts_.begin() ? parts_.end() : std::prev(after);
}

uint64_t OutStream::placeOf(uint64_t offset) const {
  const auto part = partAt(offset);
  return part == parts_.end() ? 0 : part->place;
}

size_t OutStream::promise(uint64_t offset, size_t most) {
  promised_ = std::min<uint64_t>(offset + most, end_);
  return promised_ - offset;
}

size_t OutStream::gather(uint64_t offset, size_t bytes, std::span<iovec> parts) const {
  size_t count = 0;
  for (auto part = partAt(offset); part != parts_.end() && bytes > 0 && count < parts.size(); ++part) {
    const size_t here = std::min<size_t>(bytes, part->end() - offset);
    if (here == 0) break;  // offset is the stream's end
    parts[count++] = {const_cast<std::byte*>(part->at(offset)), here};
    offset += here;
    bytes -= here;
  }
  return count;
}

void OutStream::received(uint64_t offset) {
  if (offset < begin_ || offset > promised_) {
    throw WireError("bytes received: expected " + std::to_string(begin_) + " ... " + std::to_string(promised_) +
                    ", got " + std::to_string(offset));
  }
  begin_ = offset;
  while (!parts_.empty() && parts_.front().end() <= offset)
    parts_.pop_front();
}

void OutStream::resume(uint64_t offset) {
  received(offset);
  promised_ = offset;
}

void OutStream::clear() {
  parts_.clear();
  begin_ = promised_ = end_;
}

}  // namespace lowcomm::tcp

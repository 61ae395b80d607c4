#include "transport/tcp/out_stream.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/error.h"

namespace lowcomm::tcp {

const std::byte* OutStream::Part::at(uint64_t offset) const {
  if (is_header) return header.data() + (offset - begin);
  if (!given_up) return data + (offset - begin);
  if (offset < own_from || offset >= own_from + own.size())
    throw std::logic_error("bytes of a message that was given up: expected those of the piece under way");
  return own.data() + (offset - own_from);
}

void OutStream::append(const Record& record, std::span<const std::byte> data, uint64_t place) {
  Part header{.begin = end_, .place = place, .number = record.number, .of_message = record.hasBody()};
  write(record, header.header);
  end_ += header.size;
  parts_.push_back(std::move(header));
  if (data.empty()) return;
  parts_.push_back({.begin = end_,
                    .place = place,
                    .number = record.number,
                    .size = data.size(),
                    .is_header = false,
                    .of_message = true,
                    .data = data.data()});
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

OutStream::Promise OutStream::promise(uint64_t offset, size_t most) {
  uint64_t end = std::min<uint64_t>(offset + most, end_);
  bool cut = false;
  for (auto part = partAt(offset); part != parts_.end() && part->begin < end; ++part) {
    if (!part->after_cut) continue;
    if (part->begin == offset) {
      cut = true;
    } else if (part->begin > offset) {
      end = part->begin;  // a piece begins behind each cut
    }
  }
  promised_from_ = offset;
  promised_ = end;
  return {end - offset, cut};
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
  if (parts_.empty()) has_given_up_ = false;
}

void OutStream::resume(uint64_t offset) {
  received(offset);
  promised_from_ = promised_ = offset;
  if (has_given_up_) recut(offset);
}

bool OutStream::has(uint64_t number) const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const Part& part) { return part.of_message && part.number == number; });
}

void OutStream::giveUp(std::span<const uint64_t> numbers) {
  for (Part& part : parts_) {
    if (!part.of_message || !std::binary_search(numbers.begin(), numbers.end(), part.number)) continue;
    part.given_up = has_given_up_ = true;
    if (!part.is_header) keepPromised(part);
  }
  recut(promised_);
}

// Copies what the piece under way has of it.
void OutStream::keepPromised(Part& part) {
  const uint64_t from = std::clamp(promised_from_, part.begin, part.end());
  const uint64_t to = std::clamp(promised_, from, part.end());
  part.own.assign(part.data + (from - part.begin), part.data + (to - part.begin));
  part.own_from = from;
  part.data = nullptr;
}

// Takes out what messages that were given up have from `fixed` on; nothing before it moves.
void OutStream::recut(uint64_t fixed) {
  std::deque<Part> kept;
  uint64_t at = parts_.empty() ? end_ : parts_.front().begin;
  bool header_gone = false;
  enum class Next { as_it_is, after_cut, not_after_cut } next = Next::as_it_is;  // of the header that comes next
  for (Part& part : parts_) {
    if (part.is_header) {
      if (next != Next::as_it_is) part.after_cut = next == Next::after_cut;
      next = Next::as_it_is;
      header_gone = part.given_up && part.begin >= fixed;
      if (header_gone) {
        Record record = parseRecord(part.header);
        next = Next::not_after_cut;
        if (record.kind == Record::Kind::body) {  // the receiver waits for it, and is told that it does not come
          if (part.after_cut) next = Next::after_cut;
          continue;
        }
        record.kind = Record::Kind::offered;  // so that the receiver counts it
        write(record, part.header);
        part.given_up = part.of_message = false;
      }
    } else if (part.given_up && (header_gone || part.begin >= fixed)) {
      if (!header_gone) next = Next::after_cut;
      continue;
    } else if (part.given_up && part.end() > fixed) {
      part.size = fixed - part.begin;
      next = Next::after_cut;
    }
    part.begin = at;
    at += part.size;
    kept.push_back(std::move(part));
  }
  parts_ = std::move(kept);
  end_ = at;
}

void OutStream::clear() {
  parts_.clear();
  begin_ = promised_from_ = promised_ = end_;
  has_given_up_ = false;
}

}  // namespace lowcomm::tcp

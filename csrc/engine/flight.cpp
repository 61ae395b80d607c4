#include "engine/flight.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

namespace lowcomm {
namespace {

using Clock = OpProgress::Clock;
using Status = OpProgress::Status;

constexpr size_t kMostNameCharacters = 80;  // of a group in a file's name

// Bytes of the UTF-8 character that stands at `at`; 0 where none does: a message may be cut anywhere.
size_t characterAt(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  const size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  // Bounds of the second byte: no overlong form of a character, no surrogate, nothing beyond U+10FFFF.
  const unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (first < 0xc2 || first > 0xf4 || second < low || second > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  return length;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    const auto byte = static_cast<unsigned char>(c);
    const size_t length = characterAt(text, at);
    if (length == 0) {
      out += "\\ufffd";
    } else if (length > 1) {
      out += text.substr(at, length);
      at += length - 1;
    } else if (c == '"' || c == '\\') {
      out += std::string("\\") + c;
    } else if (byte < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string number(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.6f", value);
  return text;
}

std::string since(const std::optional<Clock::time_point>& time, Clock::time_point now) {
  return time ? number(std::chrono::duration<double>(*time - now).count()) : "null";
}

const char* nameOf(Status status) {
  switch (status) {
    case Status::queued:
      return "queued";
    case Status::under_way:
      return "under way";
    case Status::done:
      return "done";
    case Status::failed:
      break;
  }
  return "failed";
}

// "[a, b]" of what `item` makes of each number below `count`; an empty item is left out.
template <class F>
std::string listOf(size_t count, F&& item) {
  std::string list;
  for (size_t i = 0; i < count; ++i) {
    const std::string text = item(i);
    if (!text.empty()) list += (list.empty() ? "" : ", ") + text;
  }
  return list;
}

std::string missing(const OpProgress::State& op) {
  if (op.status == Status::done) return "";
  return listOf(op.frames.size(), [&](size_t rank) -> std::string {
    const OpProgress::Frames& frames = op.frames[rank];
    if (frames.received >= frames.expected) return "";
    return "{\"rank\": " + std::to_string(rank) + ", \"received\": " + std::to_string(frames.received) +
           ", \"expected\": " + std::to_string(frames.expected) + "}";
  });
}

std::string waitOf(const OpProgress::State& op, Clock::time_point now) {
  if (!op.wait) return "null";
  return "{\"rank\": " + std::to_string(op.wait->peer) +
         ", \"frame\": " + (op.wait->frame ? std::to_string(*op.wait->frame) : "null") +
         ", \"doing\": " + quoted(op.wait->doing) + ", \"since_s\": " + since(op.wait->since, now) + "}";
}

std::string entry(const OpProgress::State& op, Clock::time_point now) {
  const std::string description = listOf(op.description.size(), [&](size_t i) {
    return quoted(op.description[i].first) + ": " + quoted(op.description[i].second);
  });
  return "    {\"op\": " + quoted(op.op) + ", \"sequence\": " + std::to_string(op.sequence) + ", \"state\": \"" +
         nameOf(op.status) + "\",\n     \"description\": {" + description + "},\n     \"missing\": [" + missing(op) +
         "], \"wait\": " + waitOf(op, now) + ",\n     \"sent_bytes\": " + std::to_string(op.sent_bytes) +
         ", \"received_bytes\": " + std::to_string(op.received_bytes) + ", \"queued_s\": " + since(op.queued, now) +
         ", \"started_s\": " + since(op.started, now) + ", \"ended_s\": " + since(op.ended, now) +
         ",\n     \"error\": " + (op.error.empty() ? "null" : quoted(op.error)) + "}";
}

std::string fileSafe(const std::string& name) {
  std::string safe = name.substr(0, kMostNameCharacters);
  for (char& c : safe) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80 || !(std::isalnum(byte) || c == '-' || c == '.' || c == '_')) c = '_';
  }
  return safe;
}

}  // namespace

FlightRecord::FlightRecord(const GroupContext& group, size_t entries, std::string folder)
    : group_(group), entries_(entries), folder_(std::move(folder)) {}

std::shared_ptr<OpProgress> FlightRecord::add(const std::string& op, uint32_t sequence) {
  if (entries_ == 0) return nullptr;
  auto added = std::make_shared<OpProgress>(op, sequence);
  std::lock_guard<std::mutex> lock(mutex_);
  if (ops_.size() == entries_) {
    auto leaves = std::find_if(ops_.begin(), ops_.end(), [](const auto& known) { return known->over(); });
    if (leaves == ops_.end()) {
      leaves = std::find_if(ops_.begin(), ops_.end(), [](const auto& known) { return known->queued(); });
    }
    ops_.erase(leaves == ops_.end() ? ops_.begin() : leaves);
  }
  ops_.push_back(added);
  return added;
}

std::string FlightRecord::json(const std::string& because) const {
  std::vector<std::shared_ptr<OpProgress>> ops;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ops.assign(ops_.begin(), ops_.end());
  }
  std::vector<OpProgress::State> states;
  for (const auto& op : ops)
    states.push_back(op->state());
  const auto now = Clock::now();  // after the last of them, so that nothing lies ahead of it
  const double unix_time = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const auto rank = static_cast<size_t>(group_.rank());
  const bool global = rank < group_.global_ranks.size();
  std::string text = "{\"format\": 1,\n \"group\": " + quoted(group_.name) +
                     ", \"size\": " + std::to_string(group_.size()) + ", \"epoch\": " + std::to_string(group_.epoch) +
                     ",\n \"rank\": " + std::to_string(rank) +
                     ", \"global_rank\": " + (global ? std::to_string(group_.global_ranks[rank]) : "null") +
                     ", \"pid\": " + std::to_string(getpid()) + ",\n \"unix_time_s\": " + number(unix_time) +
                     ", \"because\": " + quoted(because) + ",\n \"ops\": [";
  for (size_t i = 0; i < states.size(); ++i)
    text += (i == 0 ? "\n" : ",\n") + entry(states[i], now);
  return text + (states.empty() ? "]}\n" : "\n ]}\n");
}

std::string FlightRecord::path() const {
  const auto rank = static_cast<size_t>(group_.rank());
  const int shown = rank < group_.global_ranks.size() ? group_.global_ranks[rank] : group_.rank();
  const auto folder = folder_.empty() ? std::filesystem::temp_directory_path() : std::filesystem::path(folder_);
  return (folder / ("lowcomm-flight-" + fileSafe(group_.name) + "-rank" + std::to_string(shown) + "-pid" +
                    std::to_string(getpid()) + "-epoch" + std::to_string(group_.epoch) + ".json"))
      .string();
}

std::string FlightRecord::write(const std::string& because) noexcept {
  std::string said = put(because);
  std::lock_guard<std::mutex> lock(mutex_);
  named_ = said;
  return said;
}

std::string FlightRecord::named() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return named_;
}

std::string FlightRecord::put(const std::string& because) const noexcept {
  if (entries_ == 0) return "";
  try {
    const std::string to = path(), part = to + ".part";
    try {
      std::ofstream file;
      file.exceptions(std::ios::failbit | std::ios::badbit);
      file.open(part, std::ios::binary | std::ios::trunc);
      file << json(because);
      file.close();
      std::filesystem::rename(part, to);
      return "; flight record: " + to;
    } catch (const std::exception& error) {
      std::error_code ignored;
      std::filesystem::remove(part, ignored);
      return "; the flight record could not be written to " + to + ": " + error.what();
    }
  } catch (const std::filesystem::filesystem_error&) {
    return "; no flight record: the system names no folder for temporary files, and LOWCOMM_FLIGHT_DIR none either";
  } catch (const std::exception&) {  // no memory left even for the words
    return "";
  }
}

}  // namespace lowcomm

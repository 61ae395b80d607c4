#include "collective/describe.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "wire/fnv1a.h"

namespace lowcomm {
namespace {

constexpr size_t kListed = 2000;  // characters a list may take

std::string bounded(const std::string& list) {
  if (list.size() <= kListed) return list;
  return list.substr(0, kListed) + "... hash " + std::to_string(fnv1a(list));
}

// The values joined by commas, or the one value when they are all the same.
std::string joined(const std::vector<Described>& messages, std::string Described::* value) {
  std::string list;
  bool same = true;
  for (const Described& message : messages) {
    same = same && message.*value == messages.front().*value;
    list += (list.empty() ? "" : ",") + message.*value;
  }
  return bounded(same && !messages.empty() ? messages.front().*value : list);
}

std::string codecOf(const MessagePlan& message) {
  const auto& segments = message.layout.segments();
  if (segments.empty()) return "none";
  const bool learned = std::any_of(segments.begin(), segments.end(), [](const Segment& s) { return s.table; });
  const std::string levels = learned ? ", levels of version " + std::to_string(message.layout.stateVersion()) : "";
  if (segments.size() == 1) return segments[0].codec.str() + levels;
  return "layout of " + std::to_string(segments.size()) + " segments, hash " + std::to_string(message.layout.hash()) +
         levels;
}

}  // namespace

Described::Described(const MessagePlan& plan)
    : dtype(dtypeName(plan.dtype)), elements(std::to_string(plan.layout.elements())), codec(codecOf(plan)) {}

Described Described::as(const std::string& type_name, const std::string& type_elements) const {
  Described described = *this;
  if (!type_name.empty()) described.dtype = type_name;
  if (!type_elements.empty()) described.elements = type_elements;
  return described;
}

Hello describe(const std::string& op, const std::vector<Described>& messages) {
  Hello hello;
  hello.fields = {
      {"op", op},
      {"tensors", std::to_string(messages.size())},
      {"dtype", joined(messages, &Described::dtype)},
      {"elements a rank", joined(messages, &Described::elements)},
      {"codec", joined(messages, &Described::codec)},
  };
  return hello;
}

}  // namespace lowcomm

#include "collective/describe.h"

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
template <class F>
std::string joined(const std::vector<MessagePlan>& messages, F&& value) {
  std::string list;
  bool same = true;
  for (const MessagePlan& message : messages) {
    same = same && value(message) == value(messages.front());
    list += (list.empty() ? "" : ",") + value(message);
  }
  return same && !messages.empty() ? value(messages.front()) : bounded(list);
}

std::string typeOf(const MessagePlan& message) {
  return message.type_name.empty() ? dtypeName(message.dtype) : message.type_name;
}

std::string elementsOf(const MessagePlan& message) {
  return std::to_string(message.type_name.empty() ? message.layout.elements() : message.type_elements);
}

std::string codecOf(const MessagePlan& message) {
  const auto& segments = message.layout.segments();
  if (segments.empty()) return "none";
  if (segments.size() == 1) return segments[0].codec.str();
  return "layout of " + std::to_string(segments.size()) + " segments, hash " + std::to_string(message.layout.hash());
}

}  // namespace

Hello describe(const std::string& op, const std::vector<MessagePlan>& messages) {
  Hello hello;
  hello.fields = {
      {"op", op},
      {"tensors", std::to_string(messages.size())},
      {"dtype", joined(messages, typeOf)},
      {"elements a rank", joined(messages, elementsOf)},
      {"codec", joined(messages, codecOf)},
  };
  return hello;
}

}  // namespace lowcomm

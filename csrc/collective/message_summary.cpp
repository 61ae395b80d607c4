#include "collective/message_summary.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "base/hashes.h"
#include "collective/plan.h"
#include "collective/summer.h"

namespace lowcomm {
namespace {

constexpr size_t kListed = 2000;  // characters a list may take

std::string bounded(const std::string& list) {
  if (list.size() <= kListed) return list;
  return list.substr(0, kListed) + "... hash " + std::to_string(fnv1a(list));
}

// The values joined by commas, or the one value when they are all the same.
std::string joined(const std::vector<MessageSummary>& messages, std::string MessageSummary::* value) {
  std::string list;
  bool same = true;
  for (const MessageSummary& message : messages) {
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

MessageSummary::MessageSummary(const MessagePlan& plan)
    : dtype(dtypeName(plan.dtype)), elements(std::to_string(plan.layout.elements())), codec(codecOf(plan)) {}

MessageSummary MessageSummary::as(const std::string& type_name, const std::string& type_elements) const {
  MessageSummary described = *this;
  if (!type_name.empty()) described.dtype = type_name;
  if (!type_elements.empty()) described.elements = type_elements;
  return described;
}

KeyValues describe(const std::string& op, const std::vector<MessageSummary>& messages) {
  return {{
      {"op", op},
      {"tensors", std::to_string(messages.size())},
      {"dtype", joined(messages, &MessageSummary::dtype)},
      {"elements a rank", joined(messages, &MessageSummary::elements)},
      {"codec", joined(messages, &MessageSummary::codec)},
  }};
}

KeyValues describeReduction(const std::string& op, const std::vector<MessageSummary>& messages,
                            const Reduction& reduction) {
  KeyValues description = describe(op, messages);
  description.fields.insert(std::prev(description.fields.end()), {"reduce op", reduction.name()});
  return description;
}

}  // namespace lowcomm

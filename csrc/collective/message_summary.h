#pragma once

#include <string>
#include <utility>
#include <vector>

#include "wire/key_values.h"

namespace lowcomm {

struct MessagePlan;
struct Reduction;

// The fields of one message that ranks compare.
struct MessageSummary {
  // By its plan: dtype's name, the layout's elements, its codec. What the caller calls the elements goes into dtype and
  // elements afterwards: the wire's `opaque` does not tell four uint16 from eight float8, and ranks' parts may differ.
  MessageSummary(const MessagePlan& plan);  // NOLINT: a plan describes itself
  // Of elements that no plan has: the inner backend's.
  MessageSummary(std::string dtype, std::string elements)
      : dtype(std::move(dtype)), elements(std::move(elements)), codec("none, by the inner backend") {}

  // The same with the caller's name of the elements' type, and their number, where these are not empty.
  MessageSummary as(const std::string& type_name, const std::string& type_elements) const;

  std::string dtype, elements, codec;
};

// The fields that ranks compare before they trust frames: op, then number, dtype, elements and codec of the messages
// (FORMAT.md, "Descriptions"). Long lists are cut and closed with a hash, so that the description fits a frame.
KeyValues describe(const std::string& op, const std::vector<MessageSummary>& messages);

// The same of a reduction, with the reduce op before the codec, which follows from it.
KeyValues describeReduction(const std::string& op, const std::vector<MessageSummary>& messages,
                            const Reduction& reduction);

}  // namespace lowcomm

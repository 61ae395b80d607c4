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
  // Takes the dtype's name, the layout's number of elements and its codec from the plan. The caller's name of the
  // elements goes into dtype and elements afterwards: the wire's `opaque` does not distinguish four uint16 from eight
  // float8, and parts of ranks may differ.
  MessageSummary(const MessagePlan& plan);  // NOLINT: a plan describes itself
  // Describes elements without a plan: those that the inner backend carries.
  MessageSummary(std::string dtype, std::string elements)
      : dtype(std::move(dtype)), elements(std::move(elements)), codec("none, by the inner backend") {}

  // A copy with the caller's name of the elements' type and their number, where these are not empty.
  MessageSummary as(const std::string& type_name, const std::string& type_elements) const;

  std::string dtype, elements, codec;
};

// The fields that ranks compare before they trust frames: op, then number, dtype, elements and codec of the messages
// (FORMAT.md, "Descriptions"). Long lists are cut and closed with a hash, so that the description fits a frame.
KeyValues describe(const std::string& op, const std::vector<MessageSummary>& messages);

// describe() for a reduction, with the reduce op before the codec, which follows from it.
KeyValues describeReduction(const std::string& op, const std::vector<MessageSummary>& messages,
                            const Reduction& reduction);

}  // namespace lowcomm

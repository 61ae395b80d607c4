#pragma once

#include <string>
#include <vector>

#include "collective/plan.h"
#include "wire/hello.h"

namespace lowcomm {

// What ranks compare before they trust each other's frames: op, then number, dtype, elements and codec of the messages
// (FORMAT.md, "Descriptions"). Long lists are cut and closed with a hash, so that the description fits a frame.
Hello describe(const std::string& op, const std::vector<MessagePlan>& messages);

}  // namespace lowcomm

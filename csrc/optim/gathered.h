#pragma once

#include <string>
#include <vector>

#include "engine/op_queue.h"

namespace lowcomm {

// Every rank's number, by rank. Collective over the queue's group; `what` names the op. Throws as runExchange.
std::vector<double> gathered(double mine, OpQueue& queue, const std::string& what);

}  // namespace lowcomm

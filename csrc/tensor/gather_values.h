#pragma once

#include <string>
#include <vector>

#include "engine/op_queue.h"

namespace lowcomm {

// Every rank's numbers, by rank, as a part of an op that is running: it takes op.sequence. All ranks give equally many.
// Collective over the op's group. Throws as runExchange.
std::vector<std::vector<double>> gatherNumbers(const std::vector<double>& mine, OpContext& op);

// The same as an op. All ranks give equally many; `what` names the op. Collective over the queue's group.
// Throws as runExchange.
std::vector<std::vector<double>> gatherNumbers(const std::vector<double>& mine, OpQueue& queue,
                                               const std::string& what);

// Every rank's number, by rank.
std::vector<double> gatherNumber(double mine, OpQueue& queue, const std::string& what);

// Every rank's text, by rank, of any lengths. Two ops.
std::vector<std::string> gatherTexts(const std::string& mine, OpQueue& queue, const std::string& what);

}  // namespace lowcomm

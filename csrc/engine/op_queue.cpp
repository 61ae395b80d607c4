#include "engine/op_queue.h"

#include <cstdint>

#include "collective/collectives.h"
#include "wire/layout.h"

namespace lowcomm {

std::vector<std::vector<double>> gatherNumbers(const std::vector<double>& mine, OpContext& op) {
  std::vector<std::vector<double>> all(op.size(), std::vector<double>(mine.size()));
  GatherMessage message{.layouts = {Layout::single(mine.size() * sizeof(double), CodecSpec{})}, .input = mine.data()};
  message.type_name = "float64";
  message.type_elements = std::to_string(mine.size());
  for (std::vector<double>& one : all)
    message.outputs.push_back(one.data());
  allGather(op, {message});
  return all;
}

std::vector<std::vector<double>> gatherNumbers(const std::vector<double>& mine, OpQueue& queue,
                                               const std::string& what) {
  std::vector<std::vector<double>> all;
  Ticket(queue, what, 1, [&](OpContext& op) { all = gatherNumbers(mine, op); }).wait();
  return all;
}

std::vector<double> gatherNumber(double mine, OpQueue& queue, const std::string& what) {
  std::vector<double> all;
  for (const std::vector<double>& one : gatherNumbers({mine}, queue, what))
    all.push_back(one[0]);
  return all;
}

std::vector<std::string> gatherTexts(const std::string& mine, OpQueue& queue, const std::string& what) {
  const std::vector<double> lengths = gatherNumber(static_cast<double>(mine.size()), queue, what);
  std::vector<std::string> all;
  GatherMessage message{.layouts = {}, .input = mine.data()};
  message.type_name = "text";
  for (const double length : lengths) {
    all.emplace_back(static_cast<size_t>(length), '\0');
    message.layouts.push_back(Layout::single(static_cast<uint64_t>(length), CodecSpec{}));
    message.type_elements += std::to_string(static_cast<uint64_t>(length)) + " ";
  }
  for (std::string& one : all)
    message.outputs.push_back(one.data());
  Ticket(queue, what, 1, [&](OpContext& op) { allGather(op, {message}); }).wait();
  return all;
}

}  // namespace lowcomm

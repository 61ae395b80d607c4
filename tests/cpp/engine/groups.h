#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ranks_on_threads.h"
#include "transport/tcp_ranks.h"

namespace lowcomm::test {

// A group over memory or over sockets.
struct Group {
  // `secret` and `rate`: of sockets.
  Group(int size, bool tcp, const std::optional<tcp::Secret>& secret = {}, const std::string& rate = "") {
    if (tcp) sockets.emplace(size, kConnections, secret, rate);
    const auto take = [&](int rank) { return std::move(sockets->transports[rank]); };
    ranks.emplace(
        size,
        [](int, GroupConfig& config) {
          config.connections = kConnections;
          config.flight_record = 1;
        },
        tcp ? Ranks::MakeTransport(take) : nullptr);
  }

  static constexpr int kConnections = 2;

  Ranks* operator->() { return &*ranks; }
  Engine& engine(int rank) { return ranks->engine(rank); }

  std::optional<lowcomm::Ranks> sockets;  // outlive the engines
  std::optional<Ranks> ranks;
};

}  // namespace lowcomm::test

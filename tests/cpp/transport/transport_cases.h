#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/transport.h"

// Messages and expectations that the tests of all transports share.

namespace lowcomm {

using Bytes = std::vector<std::byte>;
using Kind = TransportError::Kind;
using std::chrono::milliseconds;

inline constexpr milliseconds kSoon{30}, kLong{20000};

inline Bytes message(size_t size, unsigned mark) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>(mark + i * 7 + (i >> 8));
  return bytes;
}

inline void expectFails(Transfer& transfer, Kind kind, int peer, milliseconds deadline = kLong) {
  try {
    transfer.wait(deadline);
    ADD_FAILURE() << "expected a TransportError";
  } catch (const TransportError& error) {
    EXPECT_EQ(error.kind, kind) << error.what();
    EXPECT_EQ(error.peer, peer) << error.what();
  }
}

// A message from one end arrives whole at the other, whichever side comes first.
inline void expectArrives(Transport& from, Transport& to, const Bytes& out, Lane lane = Lane::bulk, uint32_t tag = 0) {
  Bytes in(out.size());
  const auto sent = from.isend(lane, to.rank(), tag, out);
  to.irecv(lane, from.rank(), tag, in)->wait(kLong);
  sent->wait(kLong);
  EXPECT_EQ(in, out);
}

// In order for a (lane, peer, tag), whichever side comes first, and into rooms that are longer. `unit`: bytes by which
// a message is longer than the one before.
inline void expectOrderInEveryLaneAndTag(Transport& from, Transport& to, size_t unit) {
  for (bool receive_first : {true, false}) {
    std::vector<Bytes> in, out;
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (size_t i = 0; i < 12; ++i) {
      out.push_back(message(i * unit, static_cast<unsigned>(i)));
      in.emplace_back(13 * unit);
    }
    const auto lane = [](size_t i) { return i % 2 ? Lane::control : Lane::bulk; };
    const auto receive = [&] {
      for (size_t i : {3, 7, 11, 2, 6, 10, 1, 5, 9, 0, 4, 8})  // backwards over lanes and tags, forwards within one
        transfers.push_back(to.irecv(lane(i), from.rank(), i % 4, in[i]));
    };
    const auto send = [&] {
      for (size_t i = 0; i < 12; ++i)
        transfers.push_back(from.isend(lane(i), to.rank(), i % 4, out[i]));
    };
    receive_first ? (receive(), send()) : (send(), receive());
    for (auto& transfer : transfers)
      transfer->wait(kLong);
    for (size_t i = 0; i < 12; ++i)
      EXPECT_EQ(Bytes(in[i].begin(), in[i].begin() + out[i].size()), out[i]) << i;
  }
}

// A send is done when its receive is, so that what waits for receives is no more than its senders have under way.
inline void expectSendWaitsForItsReceive(Transport& from, Transport& to) {
  const Bytes out = message(1000, 1);
  Bytes in(1000);
  const auto sent = from.isend(Lane::bulk, to.rank(), 4, out);
  expectFails(*sent, Kind::timed_out, to.rank(), kSoon);
  to.irecv(Lane::bulk, from.rank(), 4, in)->wait(kLong);
  sent->wait(kLong);
  EXPECT_EQ(in, out);
}

}  // namespace lowcomm

#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
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

}  // namespace lowcomm

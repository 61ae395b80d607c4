#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/connection.h"
#include "transport/tcp/message_stream.h"
#include "transport/transport_cases.h"

// The two ends of a channel with its connections, but without a network.

namespace lowcomm::tcp {

using Random = std::mt19937;

inline size_t below(Random& random, size_t n) {
  return random() % n;
}

// Bytes that one end has written and the other has not read. It moves parts of what it is asked to, or nothing.
class MemoryPipe final : public Pipe {
 public:
  MemoryPipe(std::shared_ptr<std::deque<std::byte>> in, std::shared_ptr<std::deque<std::byte>> out, Random& random)
      : Pipe(Fd()), in_(std::move(in)), out_(std::move(out)), random_(random) {}

  Moved read(std::span<std::byte> room, size_t& turn) override {
    const size_t bytes = std::min({room.size(), in_->size(), turn, size_t{1} << below(random_, 18)});
    if (below(random_, 4) == 0) turn = bytes;
    turn -= bytes;
    std::copy_n(in_->begin(), bytes, room.begin());
    in_->erase(in_->begin(), in_->begin() + static_cast<std::ptrdiff_t>(bytes));
    return {bytes};
  }

  Moved write(std::span<const iovec> parts) override {
    size_t room = below(random_, 3) == 0 ? 0 : size_t{1} << below(random_, 18), bytes = 0;
    for (const iovec& part : parts) {
      const size_t here = std::min(part.iov_len, room);
      const auto* from = static_cast<const std::byte*>(part.iov_base);
      out_->insert(out_->end(), from, from + here);
      room -= here;
      bytes += here;
    }
    return {bytes};
  }

  void expect(size_t) override {}

 private:
  const std::shared_ptr<std::deque<std::byte>> in_, out_;
  Random& random_;
};

// A message, or a receive, at one end.
struct Item {
  std::shared_ptr<Delivery> delivery;
  std::unique_ptr<Bytes> bytes;
};

inline constexpr uint32_t kTags = 3;

// Two ends, all that goes on between them in an order that a seed draws.
class Two {
 public:
  explicit Two(unsigned seed) : random(seed) { reset(); }

  struct End {
    explicit End(int peer) : channel(peer) {}
    MessageStream channel;
    std::unique_ptr<Connection> connection;
    std::array<std::vector<Item>, kTags> sends, receives;
  };

  // Every connection is lost with what was on its way, and another one made.
  void reset() {
    std::array<uint64_t, 2> in;
    for (int i : {0, 1}) {
      flights[i] = std::make_shared<std::deque<std::byte>>();
      ends[i].connection.reset();
      const auto lock = ends[i].channel.lock();
      in[i] = ends[i].channel.in();
    }
    for (int i : {0, 1}) {
      {
        const auto lock = ends[i].channel.lock();
        ends[i].channel.out().resume(in[1 - i]);
      }
      ends[i].connection = std::make_unique<Connection>(
          std::make_unique<MemoryPipe>(flights[1 - i], flights[i], random), ends[i].channel, in[1 - i]);
    }
  }

  static Bytes contents(int from, uint32_t tag, size_t index, Random& random) {
    return message(below(random, 5) == 0 ? below(random, 3) : below(random, 80'000),
                   static_cast<unsigned>(from * 7 + tag * 101 + index * 13));
  }

  void send(int from, uint32_t tag) {
    auto& items = ends[from].sends[tag];
    auto bytes = std::make_unique<Bytes>(contents(from, tag, items.size(), random));
    auto delivery = ends[from].channel.send(tag, *bytes);
    items.push_back({std::move(delivery), std::move(bytes)});
  }

  void receive(int at, uint32_t tag) {
    auto bytes = std::make_unique<Bytes>(80'000);
    auto delivery = ends[at].channel.receive(tag, *bytes);
    ends[at].receives[tag].push_back({std::move(delivery), std::move(bytes)});
  }

  void step(int at) {
    End& end = ends[at];
    if (below(random, 2)) {
      ASSERT_EQ(end.connection->write(), std::nullopt);
    } else {
      ASSERT_EQ(end.connection->read(), std::nullopt);
    }
  }

  // All that is on its way arrives.
  void settle() {
    for (int i = 0; i < 20'000 && (i % 64 != 0 || !isQuiet()); ++i)
      step(i % 2);
    ASSERT_TRUE(isQuiet());
  }

  bool isQuiet() {
    for (int i : {0, 1}) {
      const auto lock = ends[i].channel.lock();
      const auto other = ends[1 - i].channel.lock();
      if (ends[i].channel.out().end() != ends[1 - i].channel.in()) return false;
    }
    return true;
  }

  Random random;
  std::array<End, 2> ends{End(1), End(0)};
  std::array<std::shared_ptr<std::deque<std::byte>>, 2> flights;  // by sender
};

}  // namespace lowcomm::tcp

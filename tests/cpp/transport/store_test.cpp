// A store on the port of an endpoint: torch's semantics, waits that end, and a connection that is cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "ranks_on_threads.h"
#include "transport/tcp/store_client.h"
#include "transport/tcp/store_server.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;
using Kind = StoreMessage::Kind;
using test::holds;

std::shared_ptr<Endpoint> endpoint() {
  return std::make_shared<Endpoint>(EndpointOptions{"127.0.0.1:0"});
}

StoreMessage request(Kind kind, std::vector<std::string> texts, int64_t number = 0, uint64_t wait_ms = 0) {
  return {kind, number, wait_ms, std::move(texts)};
}

struct Served {
  std::shared_ptr<Endpoint> mine = endpoint(), theirs = endpoint();
  std::unique_ptr<StoreServer> server = std::make_unique<StoreServer>(mine);
  StoreClient client{theirs, mine->addresses()[0], 10s};

  StoreMessage call(Kind kind, std::vector<std::string> texts, int64_t number = 0, uint64_t wait_ms = 0) {
    return client.call(request(kind, std::move(texts), number, wait_ms), 10s);
  }
};

TEST(Store, HasTorchsSemantics) {
  Served store;
  using Texts = std::vector<std::string>;
  EXPECT_EQ(store.call(Kind::check, {"a"}).number, 0);
  EXPECT_EQ(store.call(Kind::get, {"a"}).kind, Kind::timed_out);
  store.call(Kind::set, {"a", std::string("\0x\n", 3)});
  EXPECT_EQ(store.call(Kind::get, {"a"}).texts, Texts{std::string("\0x\n", 3)});
  EXPECT_EQ(store.call(Kind::check, {"a"}).number, 1);
  EXPECT_EQ(store.call(Kind::check, {"a", "b"}).number, 0);
  store.call(Kind::append, {"a", "more"});
  EXPECT_EQ(store.call(Kind::get, {"a"}).texts, Texts{std::string("\0x\nmore", 7)});
  EXPECT_EQ(store.call(Kind::add, {"n"}, 5).number, 5);
  EXPECT_EQ(store.call(Kind::add, {"n"}, -7).number, -2);
  EXPECT_EQ(store.call(Kind::get, {"n"}).texts, Texts{"-2"});
  EXPECT_EQ(store.call(Kind::add, {"a"}, 1).kind, Kind::refused);
  EXPECT_EQ(store.call(Kind::compare_set, {"c", "old", "new"}).texts, Texts{"old"}) << "of a key that is not there";
  EXPECT_EQ(store.call(Kind::check, {"c"}).number, 0);
  EXPECT_EQ(store.call(Kind::compare_set, {"c", "", "first"}).texts, Texts{"first"});
  EXPECT_EQ(store.call(Kind::compare_set, {"c", "other", "new"}).texts, Texts{"first"});
  EXPECT_EQ(store.call(Kind::compare_set, {"c", "first", "new"}).texts, Texts{"new"});
  store.call(Kind::multi_set, {"x", "1", "y", "2"});
  EXPECT_EQ(store.call(Kind::multi_get, {"y", "x"}).texts, (Texts{"2", "1"}));
  EXPECT_EQ(store.call(Kind::count, {}).number, 5);
  EXPECT_EQ(store.call(Kind::list, {}).texts, (Texts{"a", "c", "n", "x", "y"}));
  EXPECT_EQ(store.call(Kind::erase, {"x"}).number, 1);
  EXPECT_EQ(store.call(Kind::erase, {"x"}).number, 0);
  store.call(Kind::push, {"q", "1"});
  store.call(Kind::push, {"q", "2"});
  EXPECT_EQ(store.call(Kind::length, {"q"}).number, 2);
  EXPECT_EQ(store.call(Kind::pop, {"q"}).texts, Texts{"1"});
  EXPECT_EQ(store.call(Kind::pop, {"q"}).texts, Texts{"2"});
  EXPECT_EQ(store.call(Kind::pop, {"q"}).kind, Kind::timed_out);
  EXPECT_EQ(store.call(Kind::set, {"alone"}).kind, Kind::refused);
  EXPECT_EQ(store.server->call(request(Kind::get, {"y"})).texts, Texts{"2"}) << "of its own process";
}

TEST(Store, AWaitEndsWithTheLastKeyOrWithItsTime) {
  Served store;
  StoreClient other(store.theirs, store.mine->addresses()[0], 10s);
  std::thread sets([&] {
    for (const char* key : {"a", "b"}) {
      std::this_thread::sleep_for(30ms);
      other.call(request(Kind::set, {key, "1"}), 10s);
    }
    std::this_thread::sleep_for(30ms);
    store.server->call(request(Kind::set, {"c", "3"}));
  });
  EXPECT_EQ(store.call(Kind::wait, {"a", "b"}, 0, 10000).kind, Kind::ok);
  EXPECT_EQ(store.call(Kind::get, {"c"}, 0, 10000).texts, std::vector<std::string>{"3"});
  sets.join();
  const auto before = Clock::now();
  EXPECT_EQ(store.call(Kind::wait, {"a", "nobody"}, 0, 50).kind, Kind::timed_out);
  EXPECT_EQ(store.server->call(request(Kind::wait, {"nobody"}, 0, 50)).kind, Kind::timed_out);
  EXPECT_GE(Clock::now() - before, 100ms);
}

TEST(Store, ManyClientsCountTogether) {
  Served store;
  std::vector<std::thread> threads;
  for (int k = 0; k < 8; ++k) {
    threads.emplace_back([&] {
      StoreClient client(endpoint(), store.mine->addresses()[0], 10s);
      for (int i = 0; i < 50; ++i)
        client.call(request(Kind::add, {"n"}, 1), 10s);
    });
  }
  for (auto& thread : threads)
    thread.join();
  EXPECT_EQ(store.call(Kind::add, {"n"}, 0).number, 400);
}

TEST(Store, ConnectionsThatAreCutLoseNothing) {
  Served store;
  std::atomic<bool> over{false};
  std::thread cuts([&] {
    while (!over) {
      std::this_thread::sleep_for(20ms);
      store.mine->cut();
    }
  });
  const std::string value(200000, 'x');
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(store.call(Kind::add, {"n"}, 1).number, i + 1);
    store.call(Kind::set, {"v", value + std::to_string(i)});
    EXPECT_EQ(store.call(Kind::get, {"v"}).texts[0], value + std::to_string(i));
  }
  over = true;
  cuts.join();
}

TEST(Store, AServerThatComesLaterIsFound) {
  const auto probe = endpoint();
  const std::string address = probe->addresses()[0];
  std::unique_ptr<StoreServer> server;
  std::thread starts([&] {
    std::this_thread::sleep_for(300ms);
    server = std::make_unique<StoreServer>(probe);
  });
  StoreClient client(endpoint(), address, 10s);  // the port is there before the store is
  starts.join();
  EXPECT_EQ(client.call(request(Kind::count, {}), 10s).number, 0);
}

TEST(Store, NobodyThereIsNamed) {
  try {
    StoreClient client(endpoint(), "127.0.0.1:1", 200ms);
    FAIL() << "expected an error";
  } catch (const TransportError& error) {
    EXPECT_TRUE(holds(error.what(), {"127.0.0.1:1", "200 ms"}));
  }
}

TEST(Store, AServerThatEndsIsNamed) {
  Served store;
  store.server.reset();
  EXPECT_THROW(store.call(Kind::count, {}), TransportError);
  EXPECT_THROW(store.call(Kind::count, {}), TransportError);
}

TEST(Store, OneEndpointServesOneStore) {
  Served store;
  EXPECT_THROW(StoreServer{store.mine}, ValueError);
}

TEST(Store, MessagesThatAreNoneAreRefused) {
  const auto bytes = request(Kind::set, {"key", "value"}, 7, 9).bytes();
  const StoreMessage back = StoreMessage::parse(bytes);
  EXPECT_EQ(back.texts, (std::vector<std::string>{"key", "value"}));
  EXPECT_EQ(back.number, 7);
  EXPECT_EQ(back.wait_ms, 9u);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(StoreMessage::parse(std::span(bytes).first(size)), WireError) << size;
  auto longer = bytes;
  longer.push_back({});
  EXPECT_THROW(StoreMessage::parse(longer), WireError);
}

}  // namespace
}  // namespace lowcomm::tcp

#include "engine/handshake.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "base/error.h"

namespace lowcomm {
namespace {

using namespace std::chrono_literals;

class InMemory final : public Rendezvous {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }

  void wait(const std::string& key, std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return values_.contains(key); }))
      throw std::runtime_error("no value of " + key);
  }

  std::string get(const std::string& key) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return values_.at(key);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

KeyValues saying(const std::string& key, const std::string& value) {
  KeyValues hello;
  hello.fields.emplace_back(key, value);
  return hello;
}

// Of each rank its epoch, or why it has none.
std::vector<std::string> shaken(Rendezvous& rendezvous, const std::vector<KeyValues>& hellos) {
  std::vector<std::future<std::string>> ranks;
  for (size_t rank = 0; rank < hellos.size(); ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank]() -> std::string {
      try {
        return std::to_string(
            handshake(rendezvous, static_cast<int>(rank), static_cast<int>(hellos.size()), hellos[rank], 20s));
      } catch (const PeerError& error) {
        return error.what();
      }
    }));
  }
  std::vector<std::string> came;
  for (auto& rank : ranks)
    came.push_back(rank.get());
  return came;
}

TEST(Handshake, RanksTakeTheEpochOfRank0) {
  InMemory rendezvous;
  const auto epochs = shaken(rendezvous, std::vector<KeyValues>(3, saying("policy", "all_gather=minmax8")));
  EXPECT_EQ(epochs, std::vector<std::string>(3, rendezvous.get("lowcomm/epoch")));
}

TEST(Handshake, EveryRankNamesTheFieldThatDiffers) {
  InMemory rendezvous;
  const auto told = shaken(rendezvous, {saying("seed", "1"), saying("seed", "2")});
  EXPECT_EQ(told[0], "lowcomm: making a group: seed differs: rank 0 has '1', rank 1 has '2'");
  EXPECT_NE(told[1].find("seed differs"), std::string::npos) << told[1];
}

TEST(Handshake, ARankThatCannotJoinSaysWhy) {
  InMemory rendezvous;
  refuseHandshake(rendezvous, 1, "chunk_bytes: expected more");
  try {
    handshake(rendezvous, 0, 2, saying("seed", "1"), 20s);
    FAIL();
  } catch (const PeerError& error) {
    EXPECT_EQ(error.peer, 1);
    EXPECT_NE(std::string(error.what()).find("chunk_bytes: expected more"), std::string::npos) << error.what();
  }
}

TEST(Handshake, ARankThatDoesNotComeIsNamed) {
  InMemory rendezvous;
  try {
    handshake(rendezvous, 0, 2, saying("seed", "1"), 1ms);
    FAIL();
  } catch (const PeerError& error) {
    EXPECT_STREQ(error.what(),
                 "lowcomm: making a group: rank 1 did not say hello within 1 ms: no value of lowcomm/hello/1");
  }
}

}  // namespace
}  // namespace lowcomm

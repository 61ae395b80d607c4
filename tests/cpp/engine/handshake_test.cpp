#include "engine/handshake.h"

#include <gtest/gtest.h>

#include <future>
#include <vector>

#include "base/error.h"
#include "errors.h"
#include "transport/tcp_ranks.h"

namespace lowcomm {
namespace {

using namespace std::chrono_literals;

KeyValues saying(const std::string& key, const std::string& value) {
  KeyValues hello;
  hello.fields.emplace_back(key, value);
  return hello;
}

std::string joined(const std::vector<std::string>& hosts) {
  std::string text;
  for (const std::string& host : hosts)
    text += " " + host;
  return text;
}

// Of each rank its epoch and everyone's hosts, or why it has none. Ranks of one host do not follow each other.
std::vector<std::string> shaken(Rendezvous& rendezvous, const std::vector<KeyValues>& hellos) {
  std::vector<std::future<std::string>> ranks;
  for (size_t rank = 0; rank < hellos.size(); ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank]() -> std::string {
      try {
        const Handshake met = handshake(rendezvous, static_cast<int>(rank), static_cast<int>(hellos.size()),
                                        hellos[rank], std::to_string(rank % 2), 20s);
        return std::to_string(met.epoch) + joined(met.hosts);
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

TEST(Handshake, RanksTakeTheEpochOfRank0AndKnowTheirHosts) {
  MapRendezvous rendezvous;
  const auto epochs = shaken(rendezvous, std::vector<KeyValues>(3, saying("policy", "all_gather=minmax8")));
  EXPECT_EQ(epochs, std::vector<std::string>(3, rendezvous.get("lowcomm/epoch") + " 0 1 0"));
}

TEST(Handshake, ARankThatDoesNotComeIsNamed) {
  MapRendezvous rendezvous;
  const auto joined = [&] { handshake(rendezvous, 0, 2, saying("seed", "1"), "", 1ms); };
  EXPECT_EQ(test::thrownBy<PeerError>(joined),
            "lowcomm: making a group: rank 1 did not say hello within 1 ms: no lowcomm/hello/1");
}

}  // namespace
}  // namespace lowcomm

#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/tcp/endpoint.h"
#include "transport/tcp/store_table.h"

namespace lowcomm::tcp {

// The group under whose id clients of a store come to an endpoint's port. The server is its rank 0; a client is a rank
// of a number that it draws.
inline constexpr const char kStoreGroup[] = "lowcomm's store ";

GroupId storeGroup();

// Serves a store on an endpoint's port, for as long as it lives: one thread for all clients. What waits for a key waits
// here, until its request's time is over. Clients' channels survive their connections, as a group's do.
class StoreServer {
 public:
  // ValueError where the endpoint serves one already.
  explicit StoreServer(std::shared_ptr<Endpoint> endpoint);
  ~StoreServer();

  // A request of this process. Blocks while it waits for a key. Thread-safe.
  StoreMessage call(const StoreMessage& request);

 private:
  // A client of another process, from its first hello to its channel's end: one request at a time.
  struct Client {
    std::shared_ptr<Link> link;
    std::array<std::byte, kStoreHeaderBytes> header_in, header_out;
    std::vector<std::byte> body_in, body_out;
    std::shared_ptr<Delivery> receiving;
    bool has_header = false, ended = false;
  };
  using ClientId = std::pair<uint32_t, uint64_t>;  // its rank and incarnation
  struct Waiting {
    StoreMessage request;
    std::optional<Clock::time_point> deadline;
    std::optional<ClientId> client;  // or
    StoreMessage* answer = nullptr;  // of this process
    bool* answered = nullptr;
  };

  std::shared_ptr<Link> admit(const Hello& hello);
  void expectHeader(Client& client, const ClientId& id);
  void loop();
  void note(const ClientId& id);
  void hear(const ClientId& id);
  void take(Waiting waiting);
  void answer(const Waiting& waiting, const StoreMessage& message);
  void retry();
  void drop(const ClientId& id);

  const std::shared_ptr<Endpoint> endpoint_;
  std::mutex mutex_;  // of all down to the next; taken after an endpoint's and a channel's
  std::condition_variable changed_, answered_;
  std::deque<ClientId> come_;
  std::map<ClientId, std::shared_ptr<Client>> clients_;
  bool stop_ = false, poked_ = false;
  std::mutex table_mutex_;  // of the two below
  StoreTable table_;
  std::list<Waiting> waiting_;
  std::thread thread_;
};

}  // namespace lowcomm::tcp

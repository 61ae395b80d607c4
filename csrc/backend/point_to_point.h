#pragma once

#include <functional>
#include <memory>

#include "backend/group_parts.h"

namespace lowcomm {

// send and recv: on lowcomm's own lane, encoded or exact, where the policy names `p2p`; else served by the inner
// backend. Messages of lowcomm's own are sent and posted by the caller and finished by the thread that waits.
class PointToPoint {
 public:
  // `parts` outlive this.
  explicit PointToPoint(GroupParts& parts) : parts_(parts) {}

  // Arguments and results are c10d's. Called inside Coalescing::run().
  WorkPtr send(Tensors& tensors, int to, int tag);
  WorkPtr recv(Tensors& tensors, int from, int tag);
  // ValueError where the policy names p2p: the sender must be named.
  WorkPtr recvAnysource(Tensors& tensors, int tag);

 private:
  struct P2pRequest;
  struct P2pInFlight;

  WorkPtr exactOrCoded(c10d::OpType op, const Tensors& tensors, int peer, int tag,
                       std::function<WorkPtr(c10d::Backend&)> call);
  void checkPeer(const char* name, int peer) const;
  void checkExact(c10d::OpType op, const Tensors& tensors, int peer, int tag) const;
  std::shared_ptr<P2pRequest> requestOf(c10d::OpType type, const Tensors& tensors, int peer, int tag);
  void prepare(P2pRequest& message);
  WorkPtr post(const std::shared_ptr<P2pRequest>& request);
  void finish(P2pInFlight& flight);

  GroupParts& parts_;
};

}  // namespace lowcomm

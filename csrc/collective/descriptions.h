#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "collective/conversation.h"
#include "wire/key_values.h"

namespace lowcomm {

class OpContext;
struct Exchange;

// The descriptions of an op that ranks exchange before its frames (FORMAT.md, "Descriptions"), and the end of the op
// between ranks that describe different ones.
class Descriptions {
 public:
  // All of it lives as long as this.
  Descriptions(OpContext& op, const Exchange& exchange, Conversation& conversation);

  // Tells the flight record the description, and how many frames will come.
  void record() const;

  // Sends this rank's to every peer. Their receives are posted before (Conversation::postDescription).
  void send();

  // The first peer that describes another op, and the field with both values.
  struct Difference {
    int peer;
    std::string text;
  };

  // Waits for every peer's and compares it with this rank's. Throws PeerError for a frame that is no description.
  std::optional<Difference> compare();

  // Whether `peer` describes another op: no frame of a round goes to it or is taken from it. Known after compare().
  bool differs(int peer) const { return differs_[peer]; }

  // Ends the op with all peers that differ. They have other frames for it than this rank has posted receives for, and
  // the other way round. So both tell each other how many, over the control lane; the smaller number is filled up with
  // error frames that carry `reason`; and every receive is waited for. Nothing of this op is left on the lane then.
  void part(const std::string& reason);

  // All frames of this class, perhaps under way: the last call.
  std::vector<OutgoingFrame> release();

 private:
  // The frames of one op between this rank and a peer, descriptions among them.
  struct FrameCounts {
    uint32_t sent = 0;      // by the one rank to the other
    uint32_t expected = 0;  // by the one rank from the other: receives that it has posted
  };

  KeyValues forPeer(int peer) const;
  std::string rates() const;
  std::map<int, FrameCounts> exchangeCounts() const;

  OpContext& op_;
  const Exchange& exchange_;
  Conversation& conversation_;
  std::vector<OutgoingFrame> frames_;  // one for all peers, or one each
  OutgoingFrame filler_;               // the error frame to ranks that differ
  std::vector<bool> differs_;          // by rank
};

}  // namespace lowcomm

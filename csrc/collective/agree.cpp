#include "collective/collectives.h"

#include <string>
#include <vector>

#include "base/error.h"
#include "collective/context.h"
#include "collective/text_exchange.h"

namespace lowcomm {

void agree(OpContext& op, const KeyValues& mine) {
  GroupContext& group = op.group;
  const int rank = group.rank(), size = group.size();
  const std::string text = mine.text();
  if (text.size() > group.frames.capacity() - kFrameHeaderBytes) {
    throw ValueError(op.op + ": expected at most " + std::to_string(group.frames.capacity() - kFrameHeaderBytes) +
                     " bytes to agree on, got " + std::to_string(text.size()));
  }
  std::vector<TextExchange> peers;
  op.conversing = true;
  for (int d = 1; d < size; ++d)
    peers.emplace_back(op, (rank - d + size) % size, FrameKind::hello, Lane::control, op.first_tag + kAgreementTag)
        .post();
  for (TextExchange& peer : peers)
    peer.send(text);

  std::string differs;
  for (TextExchange& peer : peers) {
    const KeyValues theirs = peer.receive("waiting for what it agrees to");
    peer.settle("sending what to agree on");
    try {
      expectSameFields(mine, rank, theirs, peer.peer());
    } catch (const WireError& error) {
      if (differs.empty()) differs = error.what();
    }
  }
  op.conversing = false;
  if (!differs.empty()) {
    throw PeerRefusal("lowcomm: " + op.op + " refused: " + differs + " [group " + group.name + ", sequence " +
                      std::to_string(op.sequence) + "]");
  }
}

}  // namespace lowcomm

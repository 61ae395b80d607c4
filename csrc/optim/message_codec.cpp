#include "optim/message_codec.h"

#include <string>

#include "base/error.h"

namespace lowcomm {

void expectMessageCodec(const char* who, const CodecSpec& codec) {
  const std::string what = std::string(who) + ": codec: expected one ";
  if (codec.axis == Axis::channel || needsTable(codec))
    throw ValueError(what + "of flat tensors without a level table, got '" + codec.str() + "'");
  if (codec.nonfinite == Nonfinite::saturate)
    throw ValueError(what + "by which a NaN arrives, got '" + codec.str() + "'");
}

CodecSpec poisoning(const CodecSpec& codec) {
  CodecSpec poisons = codec;
  poisons.nonfinite = Nonfinite::poison;
  return misfit(poisons) ? codec : poisons;
}

}  // namespace lowcomm

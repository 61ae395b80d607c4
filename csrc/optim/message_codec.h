#pragma once

#include "codec/spec.h"

namespace lowcomm {

// Throws ValueError in the name of the optimizer `who` unless its messages can have this codec: of flat tensors,
// without a level table, and by which a NaN arrives, for all ranks to see it.
void expectMessageCodec(const char* who, const CodecSpec& codec);

// The same codec with nonfinite=poison, by which a NaN arrives; itself where that does not fit: some have no other way.
CodecSpec poisoning(const CodecSpec& codec);

}  // namespace lowcomm

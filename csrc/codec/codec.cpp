#include "codec/codec.h"

#include <string>

#include "codec/dispatch.h"
#include "codec/error.h"
#include "codec/grid.h"
#include "codec/none.h"

namespace lowcomm {

std::shared_ptr<const Codec> makeCodec(const CodecSpec& spec) {
  switch (spec.id) {
    case CodecId::none:
      return std::make_shared<NoneCodec>(spec);
    case CodecId::minmax:
    case CodecId::qsgd:
      return std::make_shared<GridCodec>(spec, kernels());
    case CodecId::layout:
      break;
  }
  throw ValueError("codec number: expected one of " + codecNames() + ", got " +
                   std::to_string(static_cast<int>(spec.id)));
}

std::string codecNames() {
  return "none, minmax1...minmax8, qsgd1...qsgd8";
}

}  // namespace lowcomm

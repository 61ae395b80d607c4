#include "codec/codec.h"

#include <string>

#include "codec/dispatch.h"
#include "codec/error.h"
#include "codec/grid.h"
#include "codec/none.h"

namespace lowcomm {

std::shared_ptr<const Codec> makeCodec(const CodecSpec& spec) {
  if (spec.id == CodecId::none) return std::make_shared<NoneCodec>(spec);
  if (isGrid(spec.id)) return std::make_shared<GridCodec>(spec, kernels());
  throw ValueError("codec number: expected one of " + codecNames() + ", got " +
                   std::to_string(static_cast<int>(spec.id)));
}

std::shared_ptr<const Codec> Codec::with(const LevelTable&) const {
  throw ValueError(spec_.str() + ": expected no level table, got one");
}

std::string codecNames() {
  std::string names = "none";
  for (const GridFamily& family : kGridFamilies) {
    const std::string name(family.name);
    names += ", " + name;
    if (family.named()) names += std::to_string(family.least_bits);
    if (family.least_bits != family.most_bits) names += "..." + name + std::to_string(family.most_bits);
  }
  return names;
}

}  // namespace lowcomm

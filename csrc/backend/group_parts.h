#pragma once

#include <utility>

#include "backend/coalescing.h"
#include "backend/codec_chooser.h"
#include "backend/group.h"
#include "backend/inner_ops.h"
#include "backend/op_issuer.h"

namespace lowcomm {

// The objects with which the ops of one group are issued. Its LowcommBackend owns them.
struct GroupParts {
  // `owner` is that backend.
  GroupParts(c10d::Backend& owner, c10::intrusive_ptr<Options> options, StorePtr store, InnerMakers make)
      : group(owner, std::move(options)), backends(group, std::move(store), std::move(make)) {}

  Group group;
  InnerBackends backends;
  DrawCounter draws{group};
  CodecChooser codecs{group};
  Coalescing blocks{group, backends};
  OpIssuer issuer{group, backends, codecs, blocks};
  InnerOps inner{group, backends, codecs, blocks, issuer};
};

}  // namespace lowcomm

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
  GroupParts(c10d::Backend& owner, c10::intrusive_ptr<Options> options, StorePtr store, MakeNccl make)
      : group(owner, std::move(options)), inner_backend(group, std::move(store), std::move(make)) {}

  Group group;
  InnerBackend inner_backend;
  DrawCounter draws{group};
  CodecChooser codecs{group};
  Coalescing blocks{group, inner_backend};
  OpIssuer issuer{group, inner_backend, codecs, blocks};
  InnerOps inner{group, inner_backend, codecs, blocks, issuer};
};

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "codec/change.h"
#include "kernels/grid/grid_form.h"

namespace lowcomm {

struct KernelTable;

// A payload of a grid codec around 0 with axis=channel, and what its loops must know.
struct ChannelPayload {
  const KernelTable& table;
  const GridForm& form;
  int bits;
  uint64_t channels;
  size_t head;  // bytes of all channels' metadata, padding included
};

// Deltas of it in two passes over x and a memory (codec/change.h): a channel's scale depends on all of its elements,
// which are subtracted anew as they are encoded. Null where the channels' period is too long for the first-level cache,
// or a range is a sum.
std::unique_ptr<ChangeEncoder> makeChannelChangeEncoder(const ChannelPayload& payload, std::byte* dst);
std::unique_ptr<ChangeDecoder> makeChannelChangeDecoder(const ChannelPayload& payload, const std::byte* src);

}  // namespace lowcomm

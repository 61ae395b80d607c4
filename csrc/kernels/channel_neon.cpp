// NEON. No STL or torch inline code here (lanes.inl says why).
#include "kernels/channel.h"

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/table.h"

// The loops take memory as little-endian words.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include "kernels/lanes_neon.inl"
//
#include "kernels/channel_vector.inl"

namespace lowcomm::neon {
const ChannelKernels kChannels = {range, largest, sums, encode, decode};
}  // namespace lowcomm::neon

#endif

// AVX2 and F16C. No STL or torch inline code here (lanes.inl says why).
#include "kernels/channel.h"

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/table.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "kernels/lanes_avx2.inl"
//
#include "kernels/channel_vector.inl"

namespace lowcomm::avx2 {
const ChannelKernels kChannels = {range, largest, sums, encode, decode};
}  // namespace lowcomm::avx2

#endif

// AVX-512 F, BW, DQ and VL. No STL or torch inline code here (lanes.inl says why).
#include "kernels/channel.h"

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kernels/lanes_avx512.inl"
//
#include "kernels/channel_vector.inl"

namespace lowcomm::avx512 {
const ChannelKernels kChannels = {range, largest, sums, encode, decode};
}  // namespace lowcomm::avx512

#endif

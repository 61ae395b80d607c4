// AVX2 and F16C. No STL or torch inline code here (lanes.inl says why).
#include "kernels/select.h"

#include "kernels/table.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "kernels/lanes_avx2.inl"
//
#include "kernels/select_vector.inl"

namespace lowcomm::avx2 {
const SelectKernels kSelect = {count, gather, mark};
}  // namespace lowcomm::avx2

#endif

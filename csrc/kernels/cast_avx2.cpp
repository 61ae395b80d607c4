// AVX2 and F16C. No STL or torch inline code here (lanes.inl says why).
#include "kernels/cast.h"

#include "kernels/table.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "kernels/lanes_avx2.inl"
//
#include "kernels/cast_vector.inl"

LOWCOMM_CAST_FORM(avx2)

#endif

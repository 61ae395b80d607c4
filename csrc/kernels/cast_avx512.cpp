// AVX-512 F, BW, DQ and VL. No STL or torch inline code here (lanes.inl says why).
#include "kernels/cast.h"

#include "kernels/table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kernels/lanes_avx512.inl"
//
#include "kernels/cast_vector.inl"

LOWCOMM_CAST_FORM(avx512)

#endif

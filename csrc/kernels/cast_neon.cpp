// NEON. No STL or torch inline code here (lanes.inl says why).
#include "kernels/cast.h"

#include "kernels/table.h"

// The loops take memory as little-endian words.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include "kernels/lanes_neon.inl"
//
#include "kernels/cast_vector.inl"

LOWCOMM_CAST_FORM(neon)

#endif

// The loops of codebooks, which are grid loops with a book, and of the rotation, compiled once an instruction set.
#include <cstddef>
#include <cstdint>

#include "kernels/codebook/codebook.h"
#include "kernels/codebook/rotate.h"
#include "kernels/isa/table.h"
//
#include "kernels/grid/grid_vector.inl"

#include "kernels/codebook/rotate.inl"

// A form's tables of them.
#define LOWCOMM_CODEBOOK_FORM(form)                            \
  namespace lowcomm::form {                                    \
  constexpr CodebookLoops kCodebooks = LOWCOMM_CODEBOOK_LOOPS; \
  constexpr RotationLoops kRotation = LOWCOMM_ROTATION_LOOPS;  \
  }

#pragma once

#include "kernels/reduce.h"

namespace lowcomm {

// The operation on the elements of all ranks.
struct Reduction {
  ReduceKind kind = ReduceKind::sum;
  bool average = false;  // divide by the number of ranks, once, after the sum
  double premultiply = 1.0;
  bool premultiplied = false;  // multiply every contribution by `premultiply` before it is encoded

  // "sum", "avg", "premul_sum", "max", ...: the description's field.
  const char* name() const {
    if (average) return "avg";
    return premultiplied ? "premul_sum" : reduceName(kind);
  }
};

}  // namespace lowcomm

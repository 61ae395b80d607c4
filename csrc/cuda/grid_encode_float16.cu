#include "cuda/grid_encode.cuh"

namespace lowcomm::cuda {

template void encodeRun(const Place&, const EncodeArgs<Float16>&, GridRule, const BookArgs<true>*);

}  // namespace lowcomm::cuda

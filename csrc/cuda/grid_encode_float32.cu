#include "cuda/grid_encode.cuh"

namespace lowcomm::cuda {

template void encodeRun(const Place&, const EncodeArgs<float>&, GridRule, const BookArgs<true>*);

}  // namespace lowcomm::cuda

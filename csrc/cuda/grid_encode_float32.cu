#include "cuda/grid_encode.cuh"

namespace lowcomm::cuda {

template void encodeRun(const Place&, const EncodeArgs<float>&, bool);

}  // namespace lowcomm::cuda

#include "cuda/uncut_encode.cuh"

namespace lowcomm::cuda {

template void encodeUncutRun(const Place&, const UncutArgs<std::byte>&, const float*, GridRule, const PhiloxKey&);

}  // namespace lowcomm::cuda

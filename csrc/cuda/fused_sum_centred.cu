#include "cuda/fused_sum.cuh"

namespace lowcomm::cuda {

template void encodeSumAs<true>(const Place&, const char*, GridRule, const GridArgs<std::byte>&, const SumTerms&, void*,
                                uint64_t, const PhiloxKey&);

}  // namespace lowcomm::cuda

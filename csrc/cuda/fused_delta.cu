#include "cuda/fused_change.cuh"

namespace lowcomm::cuda {

void encodeDelta(const Place& place, const GridRun& run, void* payload, const void* x, const FusedState& m,
                 uint64_t block, const PhiloxKey& key, uint32_t* refused) {
  encodeChange<Change::delta>(place, "encode delta", run, payload, x, m, block, key, refused);
}

}  // namespace lowcomm::cuda

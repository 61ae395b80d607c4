#include "cuda/fused_change.cuh"

namespace lowcomm::cuda {

void encodeFeedback(const Place& place, const GridRun& run, void* payload, const void* g, const FusedState& e,
                    uint64_t block, const PhiloxKey& key, uint32_t* refused) {
  encodeChange<Change::feedback>(place, "encode feedback", run, payload, g, e, block, key, refused);
}

}  // namespace lowcomm::cuda

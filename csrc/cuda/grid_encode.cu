#include <cstddef>
#include <cstdint>

#include "cuda/codebook.cuh"
#include "cuda/grid.h"
#include "cuda/grid_args.cuh"
#include "cuda/grid_encode_args.cuh"

namespace lowcomm::cuda {

void encodeGrid(const Place& place, const GridRun& run, void* payload, const void* x, uint64_t block,
                const PhiloxKey& key, uint32_t* refused) {
  const GridArgs<std::byte> grid = gridArgs("encode grid", run, static_cast<std::byte*>(payload), refused);
  if (run.count == 0) return;
  const GridFamily& family = *gridFamily(run.codec.id);
  const GridRule rule = gridRule(family);
  BookArgs<true> thresholds;
  if (family.book) thresholds = thresholdArgs(run);
  const auto* book = family.book ? &thresholds : nullptr;
  switch (run.dtype) {
    case DType::float16:
      return encodeRun<Float16>(place, {grid, static_cast<const Float16*>(x), block, key}, rule, book);
    case DType::bfloat16:
      return encodeRun<Bfloat16>(place, {grid, static_cast<const Bfloat16*>(x), block, key}, rule, book);
    default:
      return encodeRun<float>(place, {grid, static_cast<const float*>(x), block, key}, rule, book);
  }
}

}  // namespace lowcomm::cuda

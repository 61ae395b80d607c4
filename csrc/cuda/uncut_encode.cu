#include <cstddef>
#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/uncut.h"
#include "cuda/uncut_args.cuh"

namespace lowcomm::cuda {

template <class T>
void encodeUncutRun(const Place& place, const UncutArgs<std::byte>& args, const T* x, GridRule rule,
                    const PhiloxKey& key);

size_t uncutWorkspaceBytes(const GridRun& run) {
  auto args = uncutArgs<std::byte>("workspace of an uncut grid", run, nullptr, nullptr);
  return run.count == 0 ? 0 : layOut(args, nullptr);
}

void encodeUncut(const Place& place, const GridRun& run, void* payload, const void* x, const PhiloxKey& key,
                 void* workspace, uint32_t* refused) {
  const auto args = uncutArgs("encode uncut grid", run, static_cast<std::byte*>(payload), workspace, refused);
  if (run.count == 0) return;
  const GridRule rule = gridRule(*gridFamily(run.codec.id));
  switch (run.dtype) {
    case DType::float16:
      return encodeUncutRun(place, args, static_cast<const Float16*>(x), rule, key);
    case DType::bfloat16:
      return encodeUncutRun(place, args, static_cast<const Bfloat16*>(x), rule, key);
    default:
      return encodeUncutRun(place, args, static_cast<const float*>(x), rule, key);
  }
}

}  // namespace lowcomm::cuda

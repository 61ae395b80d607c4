#include "cuda/run_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "base/narrow_float.h"
#include "codec/family.h"
#include "codec/nonfinite.h"
#include "cuda/accumulate.h"
#include "cuda/grid.h"
#include "cuda/launch.cuh"

namespace lowcomm::cuda {
namespace {

constexpr uint64_t kBlockElements = 512;

bool isExact(const Run& run) {
  return run.codec->spec().id == CodecId::none;
}

GridRun gridRun(const Run& run, DType dtype) {
  return {run.codec->spec(), dtype, run.count};
}

uint64_t blockOf(const Run& run) {
  return run.offset / kBlockElements;
}

PhiloxKey keyOf(const Draws& draws) {
  return {draws.seed, draws.stream, draws.step};
}

}  // namespace

bool RunKernels::takes(const CodecSpec& codec, DType dtype) const {
  if (!isCoded(dtype)) return false;
  if (codec.id == CodecId::none) return true;
  return isGrid(codec.id) && codec.axis != Axis::channel && codec.bucket != kTensorBucket && !needsTable(codec) &&
         !codec.open() && (codec.unit == 0 || codec.unit % codec.bucket == 0);
}

// The float32 sum.
size_t RunKernels::workspaceBytes(const Run& run, DType) const {
  return up64(run.count * sizeof(float));
}

void RunKernels::copy(void* to, const void* from, size_t bytes) {
  constexpr const char* kDoing = "copy";
  const DeviceScope scope(place_.device, kDoing);
  if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, place_.stream), kDoing, place_.device);
}

void RunKernels::clear(void* at, size_t bytes) {
  constexpr const char* kDoing = "clear";
  const DeviceScope scope(place_.device, kDoing);
  if (bytes > 0) check(cudaMemsetAsync(at, 0, bytes, place_.stream), kDoing, place_.device);
}

void RunKernels::encode(const Run& run, void* payload, const void* x, DType dtype, const Draws& draws, void*,
                        uint32_t* refused) {
  if (!isExact(run)) return encodeGrid(place_, gridRun(run, dtype), payload, x, blockOf(run), keyOf(draws), refused);
  const size_t bytes = run.count * itemBytes(dtype);
  copy(payload, x, bytes);
  clear(static_cast<std::byte*>(payload) + bytes, up64(bytes) - bytes);
}

void RunKernels::decode(const Run& run, void* y, DType dtype, const void* payload, void*, uint32_t* refused) {
  if (isExact(run)) return copy(y, payload, run.count * itemBytes(dtype));
  decodeGrid(place_, gridRun(run, dtype), y, payload, refused);
}

// The first term is written, not added to zeros: -0 would become 0.
void RunKernels::add(const Run& run, float* acc, DType dtype, std::span<const StagedTerm> terms, void* workspace,
                     uint32_t* refused) {
  for (size_t i = 0; i < terms.size(); ++i) {
    if (terms[i].own != nullptr || isExact(run)) {
      const void* x = terms[i].own != nullptr ? terms[i].own : terms[i].payload;
      accumulate(place_, acc, x, dtype, run.count, /*starts=*/i == 0);
    } else if (i == 0) {
      decode(run, acc, DType::float32, terms[i].payload, workspace, refused);
    } else {
      decodeAddGrid(place_, gridRun(run, dtype), acc, terms[i].payload, refused);
    }
  }
}

void RunKernels::sum(const Run& run, void* out, DType dtype, std::span<const StagedTerm> terms, int average_over,
                     void* workspace, uint32_t* refused) {
  auto* acc = static_cast<float*>(workspace);
  add(run, acc, dtype, terms, workspace, refused);
  finishSum(place_, out, acc, dtype, run.count, static_cast<uint32_t>(average_over));
}

void RunKernels::encodeSum(const Run& run, void* payload, DType dtype, std::span<const StagedTerm> terms,
                           int average_over, const Draws& draws, void* workspace, uint32_t* refused) {
  auto* acc = static_cast<float*>(workspace);
  add(run, acc, dtype, terms, workspace, refused);
  // Without a division it would change the bits of NaNs alone, which codes say nothing of.
  if (average_over > 0) finishSum(place_, acc, acc, DType::float32, run.count, static_cast<uint32_t>(average_over));
  encode(run, payload, acc, DType::float32, draws, workspace, refused);
}

}  // namespace lowcomm::cuda

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "collective/device_codec.h"
#include "cuda/device.h"

namespace lowcomm::cuda {

// The kernels of this folder as a device codec's. Takes `none` and grid codecs with all their options but
// bucket=tensor, axis=channel and the level table of levels<b>. A sum is a kernel for each term and one to finish it.
//
// Throws CudaError where the runtime refuses a call; what is said of errors in cuda/grid.h holds. Executed by the
// tests' simulator only so far.
class RunKernels final : public CodecKernels {
 public:
  // `place` stays the device codec's for as long as this lives.
  explicit RunKernels(const Place& place) : place_(place) {}

  bool takes(const CodecSpec& codec, DType dtype) const override;
  size_t workspaceBytes(const Run& run, DType dtype) const override;
  void copy(void* to, const void* from, size_t bytes) override;
  void clear(void* at, size_t bytes) override;
  void encode(const Run& run, void* payload, const void* x, DType dtype, const Draws& draws, void* workspace,
              uint32_t* refused) override;
  void decode(const Run& run, void* y, DType dtype, const void* payload, void* workspace, uint32_t* refused) override;
  void sum(const Run& run, void* out, DType dtype, std::span<const StagedTerm> terms, int average_over, void* workspace,
           uint32_t* refused) override;
  void encodeSum(const Run& run, void* payload, DType dtype, std::span<const StagedTerm> terms, int average_over,
                 const Draws& draws, void* workspace, uint32_t* refused) override;

 private:
  void add(const Run& run, float* acc, DType dtype, std::span<const StagedTerm> terms, void* workspace,
           uint32_t* refused);

  const Place place_;
};

}  // namespace lowcomm::cuda

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/grid_payload.h"
#include "codec/spec.h"
#include "kernels/grid/grid_form.h"
#include "kernels/isa/table.h"
#include "kernels/philox.h"

namespace lowcomm {

// A grid codec with axis=channel (FORMAT.md, "Channels"): the elements with the same index in the last dimension share
// a scale, as activations want it, whose channels differ in size (AQ-SGD). Arithmetic and codes are GridCodec's; only
// the buckets lie otherwise. A tensor is not cut: every scale depends on all of it.
class ChannelCodec final : public Codec {
 public:
  // The spec names its number of channels. `table` outlives the codec; other than kernels() only in tests.
  ChannelCodec(const CodecSpec& spec, const KernelTable& table);

  uint64_t granularity() const override { return kUncut; }
  bool supports(DType dtype) const override;
  size_t encodedBytes(uint64_t count, DType dtype) const override;
  void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
              const Draws& draws) const override;
  void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const override;
  void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                 uint64_t count) const override;

  void expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count, const std::string& of) const override;
  bool needsRepair(const void* src, DType dtype, uint64_t count) const override;
  void repair(void* x, DType dtype, uint64_t count) const override;

 private:
  uint64_t channels() const { return spec().bucket; }
  void checkTensor(DType dtype, uint64_t first) const;
  void checkPayload(std::span<const std::byte> src, uint64_t count) const;
  bool encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t count, const PhiloxKey& key) const;
  void poison(std::span<std::byte> dst, uint64_t count, uint64_t channel) const;
  void decodeTo(float* y, std::span<const std::byte> src, uint64_t count, bool add) const;

  const KernelTable& table_;
  std::string name_;
  GridForm form_;
  GridRule rule_;
  bool centred_;
  GridScales scales_;
  size_t meta_;  // bytes of all channels' metadata, without padding
};

}  // namespace lowcomm

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/spec.h"
#include "kernels/isa/table.h"
#include "kernels/philox.h"

namespace lowcomm {

// fp16, bf16, fp8e4m3 (FORMAT.md, "Casts"): every element by itself in a narrower floating type, to the nearest value,
// or with bf16:round=stochastic to one of the two neighbours at random without bias. Elements that have the type
// already travel as they are.
class CastCodec final : public Codec {
 public:
  // `table` outlives the codec; other than kernels() only in tests, which compare the forms.
  CastCodec(const CodecSpec& spec, const KernelTable& table);

  uint64_t granularity() const override { return 512; }
  bool supports(DType dtype) const override;
  size_t encodedBytes(uint64_t count, DType dtype) const override;
  std::optional<size_t> headBytes(uint64_t, DType) const override { return 0; }
  void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
              const Draws& draws) const override;
  void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const override;
  void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                 uint64_t count) const override;

  void expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count, const std::string& of) const override;
  bool needsRepair(const void* src, DType dtype, uint64_t count) const override;
  void repair(void* x, DType dtype, uint64_t count) const override;

 private:
  void checkRun(DType dtype, uint64_t first) const;
  void checkPayload(std::span<const std::byte> src, uint64_t count) const;
  // Whether elements of this type are the codes.
  bool same(DType dtype) const { return dtype == type_; }
  bool encodeTaken(std::byte* dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                   const PhiloxKey& key) const;
  bool narrow(std::byte* dst, const float* x, uint64_t count, uint64_t block, const PhiloxKey& key) const;
  bool widen(float* y, const std::byte* src, uint64_t count, bool add) const;
  void roundTo(uint16_t* dst, DType dtype, const float* x, uint64_t count) const;
  void expectCodes(const std::byte* src, uint64_t from, uint64_t count) const;
  void poison(std::byte* dst, const std::vector<uint64_t>& elements) const;

  const KernelTable& table_;
  std::string name_;
  DType type_;   // of the codes; opaque for fp8e4m3, which no element has
  size_t item_;  // bytes of a code
};

}  // namespace lowcomm

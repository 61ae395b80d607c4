#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/scalar_rules.h"
#include "codec/spec.h"

namespace lowcomm {

// logbyte and log9 (FORMAT.md, "Scalars"): an element's sign and rounded logarithm in 8 or 9 bits, for the few numbers
// of forward-only fine-tuning (Zelikman et al.: Just One Byte (per Gradient); 2023), of which only the order of
// magnitude matters. Relative error at most 6.5 % or 3.2 % within 4e-4...2.6e3; what is beyond
// becomes the end of the range, and NaN or an infinity the code that decodes to NaN.
class ScalarCodec final : public Codec {
 public:
  explicit ScalarCodec(const CodecSpec& spec);

  uint64_t granularity() const override { return 512; }
  bool supports(DType dtype) const override;
  size_t encodedBytes(uint64_t count, DType dtype) const override;
  std::optional<size_t> headBytes(uint64_t, DType) const override { return 0; }
  void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
              const Draws& draws) const override;
  void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const override;
  void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                 uint64_t count) const override;

 private:
  void checkRun(DType dtype, uint64_t first) const;
  void checkPayload(std::span<const std::byte> src, uint64_t count) const;
  uint32_t codeAt(std::span<const std::byte> src, uint64_t i) const;

  std::string name_;
  const ScalarTable& table_;
  uint32_t bits_;  // of a code, its sign included
};

}  // namespace lowcomm

#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

namespace lowcomm {

// A weight that is kept in 8 or 4 bits an element and never written again. Blocks of 64 elements with a scale, their
// largest magnitude in fp32 (Dettmers et al.: QLoRA, 2023, section 3); codes: 255 even levels (int8), or the 16
// quantiles of the normal distribution in the paper's appendix E (nf4).
//
// Memory an element: 1 + 1/16 or 1/2 + 1/16 bytes.
class QuantizedBase {
 public:
  // `kind`: "int8" or "nf4". Rounds to the nearest level.
  QuantizedBase(const at::Tensor& weight, const std::string& kind);

  // The decoded weight, fp32, in the weight's shape and on its device.
  at::Tensor values() const;

  // CRC-32C of codes and scales, after `before`.
  uint32_t checksum(uint32_t before) const;

  // Bytes that it takes.
  uint64_t bytes() const { return codes_.nbytes() + scales_.nbytes(); }

 private:
  bool four_bits_;
  at::DimVector shape_;
  at::Tensor codes_;   // uint8: of int8 one an element, of nf4 two
  at::Tensor scales_;  // fp32, one a block
};

}  // namespace lowcomm

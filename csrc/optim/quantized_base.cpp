#include "optim/quantized_base.h"

#include <ATen/core/grad_mode.h>

#include <cstring>

#include "base/error.h"
#include "base/hashes.h"

namespace lowcomm {
namespace {

constexpr int64_t kBlock = 64;
constexpr float kNormalLevels[16] = {-1.0f,
                                     -0.6961928009986877f,
                                     -0.5250730514526367f,
                                     -0.39491748809814453f,
                                     -0.28444138169288635f,
                                     -0.18477343022823334f,
                                     -0.09105003625154495f,
                                     0.0f,
                                     0.07958029955625534f,
                                     0.16093020141124725f,
                                     0.24611230194568634f,
                                     0.33791524171829224f,
                                     0.44070982933044434f,
                                     0.5626170039176941f,
                                     0.7229568362236023f,
                                     1.0f};

at::Tensor levels(bool four_bits, const at::Device& device) {
  at::Tensor table = at::empty({four_bits ? 16 : 255}, at::kFloat);
  float* out = table.mutable_data_ptr<float>();
  if (four_bits) {
    std::memcpy(out, kNormalLevels, sizeof kNormalLevels);
  } else {
    for (int i = 0; i < 255; ++i)
      out[i] = static_cast<float>(i - 127) / 127.0f;
  }
  return table.to(device);
}

}  // namespace

QuantizedBase::QuantizedBase(const at::Tensor& weight, const std::string& kind)
    : four_bits_(kind == "nf4"), shape_(weight.sizes()) {
  if (kind != "nf4" && kind != "int8") {
    throw ValueError("seed replay: base: expected int8 or nf4, got '" + kind + "'");
  }
  at::NoGradGuard no_grad;
  at::Tensor flat = weight.detach().to(at::kFloat).flatten();
  if (!at::isfinite(flat).all().item<bool>()) {
    throw ValueError("seed replay: base: expected finite weights, got one with NaN or infinity");
  }
  const int64_t blocks = (flat.numel() + kBlock - 1) / kBlock;
  flat = at::constant_pad_nd(flat, {0, blocks * kBlock - flat.numel()}).view({blocks, kBlock});
  scales_ = flat.abs().amax(1);
  const at::Tensor unit = at::where(scales_ > 0, scales_, 1).unsqueeze(1);
  const at::Tensor table = levels(four_bits_, flat.device());
  const int64_t last = table.numel() - 1;
  const at::Tensor middles = (table.slice(0, 0, last) + table.slice(0, 1)) / 2;
  const at::Tensor codes = at::bucketize(flat / unit, middles).to(at::kByte);
  codes_ = four_bits_ ? codes.slice(1, 0, kBlock / 2) | codes.slice(1, kBlock / 2).bitwise_left_shift(4) : codes;
}

at::Tensor QuantizedBase::values() const {
  at::NoGradGuard no_grad;
  const at::Tensor codes = four_bits_ ? at::cat({codes_ & 15, codes_.bitwise_right_shift(4)}, 1) : codes_;
  const at::Tensor unit = levels(four_bits_, codes.device()).index_select(0, codes.flatten().to(at::kInt));
  const at::Tensor flat = unit.view(codes.sizes()).mul_(scales_.unsqueeze(1)).flatten();
  return flat.slice(0, 0, c10::multiply_integers(shape_)).view(shape_).clone();
}

uint32_t QuantizedBase::checksum(uint32_t before) const {
  for (const at::Tensor& part : {codes_, scales_}) {
    const at::Tensor host = part.cpu().contiguous();
    before = crc32c(host.const_data_ptr(), host.nbytes(), before);
  }
  return before;
}

}  // namespace lowcomm

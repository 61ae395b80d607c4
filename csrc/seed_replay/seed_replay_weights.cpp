#include "seed_replay/seed_replay_weights.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/float_env.h"
#include "base/hashes.h"
#include "kernels/isa/table.h"
#include "seed_replay/device_noise.h"
#include "tensor/parallel.h"
#include "tensor/wire_type.h"

namespace lowcomm {

namespace {

// Elements that stay in the first-level cache while update after update passes over them: a Rademacher block's
// multiple.
constexpr int64_t kBlock = 4096;
// Updates whose terms are listed at a time: as many as stay in the second-level cache.
constexpr size_t kUpdatesAtATime = 256;

// Not inlined: the caller holds the floating point environment, which the compiler does not know of.
__attribute__((noinline)) void scale(float* x, size_t n, float by) {
  for (size_t i = 0; i < n; ++i)
    x[i] *= by;
}

// keep·w + sum of the terms over a few elements of the host.
void updateRun(const KernelTable& form, Noise noise, void* w, DType dtype, uint64_t first, size_t n, float keep,
               std::span<const NoiseTerm> terms) {
  if (keep == 1) {
    addNoise(form, noise, w, w, dtype, first, n, terms);
    return;
  }
  FloatEnv env;
  if (dtype == DType::float32) {
    scale(static_cast<float*>(w), n, keep);
    addNoise(form, noise, w, w, dtype, first, n, terms);
    return;
  }
  // Rounded once: after both.
  const bool half = dtype == DType::float16;
  alignas(64) float wide[kBlock];
  (half ? form.float16_to_float : form.bfloat16_to_float)(wide, static_cast<const uint16_t*>(w), n);
  scale(wide, n, keep);
  addNoise(form, noise, wide, wide, DType::float32, first, n, terms);
  (half ? form.float_to_float16 : form.float_to_bfloat16)(static_cast<uint16_t*>(w), wide, n);
}

NoiseTerm termOf(NoiseTerm term, size_t parameter) {
  term.key.stream = static_cast<uint32_t>(parameter);
  return term;
}

}  // namespace

// Updates as all parameters have them: their terms one after another, and which of these are whose.
struct ReplayWeights::Listing {
  struct One {
    float keep;  // of a parameter that decays
    size_t begin, count;
  };

  explicit Listing(std::span<const Update> list) {
    for (const Update& update : list) {
      updates.push_back({update.keep, terms.size(), update.terms.size()});
      terms.insert(terms.end(), update.terms.begin(), update.terms.end());
    }
    on_devices.emplace(terms);
  }

  std::vector<NoiseTerm> terms;
  std::vector<One> updates;
  std::optional<DeviceTerms> on_devices;
};

ReplayWeights::ReplayWeights(std::vector<ReplayParameter> parameters, Noise noise)
    : parameters_(std::move(parameters)), noise_(noise) {
  for (const auto& p : parameters_) {
    const auto type = p.tensor.scalar_type();
    if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) {
      throw TypeError("SeedReplay: parameter '" + p.name + "': expected float32, float16 or bfloat16, got " +
                      c10::toString(type));
    }
    if (!p.tensor.device().is_cpu()) expectDeviceNoise(p.name, p.tensor);
    if (!p.whole) continue;
    const auto elements = static_cast<uint64_t>(c10::multiply_integers(*p.whole));
    const auto own = static_cast<uint64_t>(p.tensor.numel());
    if (p.first > elements || own > elements - p.first) {
      throw ValueError("SeedReplay: parameter '" + p.name + "': expected a shard within " + std::to_string(elements) +
                       " elements, got " + std::to_string(own) + " from element " + std::to_string(p.first) + " on");
    }
  }
}

void ReplayWeights::apply(std::span<const Update> updates) {
  for (size_t from = 0; from < updates.size(); from += kUpdatesAtATime) {
    Listing part(updates.subspan(from, std::min(kUpdatesAtATime, updates.size() - from)));
    for (size_t number = 0; number < parameters_.size(); ++number)
      run(parameters_[number].tensor, number, part);
  }
}

void ReplayWeights::update(const at::Tensor& w, size_t parameter, const Update& update) const {
  Listing listing({&update, 1});
  run(w, parameter, listing);
}

void ReplayWeights::run(const at::Tensor& w, size_t parameter, Listing& listing) const {
  at::NoGradGuard no_grad;
  const ReplayParameter& p = parameters_[parameter];
  const auto keepOf = [&](const Listing::One& update) { return p.decayed ? update.keep : 1; };
  if (!w.device().is_cpu()) {
    for (const auto& update : listing.updates) {
      listing.on_devices->update(w, noise_, p.first, keepOf(update), static_cast<uint32_t>(parameter), update.begin,
                                 update.count);
    }
    return;
  }
  std::vector<NoiseTerm> terms;
  for (const NoiseTerm& term : listing.terms)
    terms.push_back(termOf(term, parameter));
  const KernelTable& form = kernels();
  const at::Tensor dense = w.contiguous();
  const DType dtype = wireType(dense.scalar_type());
  auto* data = static_cast<std::byte*>(dense.mutable_data_ptr());
  const int64_t count = dense.numel();
  // Blocks end where the whole tensor's do: whole ones are the fast ones.
  const auto shift = static_cast<int64_t>(p.first % kBlock);
  inParallel((count + shift + kBlock - 1) / kBlock, 16, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t at = std::max<int64_t>(block * kBlock - shift, 0);
      const int64_t n = std::min(count, (block + 1) * kBlock - shift) - at;
      for (const auto& update : listing.updates) {
        updateRun(form, noise_, data + static_cast<size_t>(at) * itemBytes(dtype), dtype,
                  p.first + static_cast<uint64_t>(at), static_cast<size_t>(n), keepOf(update),
                  {terms.data() + update.begin, update.count});
      }
    }
  });
  if (!dense.is_same(w)) w.copy_(dense);
}

at::Tensor ReplayWeights::perturbed(size_t parameter, const NoiseTerm& term) const {
  at::NoGradGuard no_grad;
  const ReplayParameter& p = parameters_.at(parameter);
  const at::Tensor from = p.tensor.contiguous();
  at::Tensor out = at::empty_like(from);
  const NoiseTerm own = termOf(term, parameter);
  if (!from.device().is_cpu()) {
    perturbOnDevice(out, from, noise_, p.first, own);
    return out;
  }
  const KernelTable& form = kernels();
  const DType dtype = wireType(from.scalar_type());
  const size_t item = itemBytes(dtype);
  const auto* x = static_cast<const std::byte*>(from.const_data_ptr());
  auto* y = static_cast<std::byte*>(out.mutable_data_ptr());
  inParallel(from.numel(), 16 * kBlock, [&](int64_t begin, int64_t end) {
    addNoise(form, noise_, y + begin * item, x + begin * item, dtype, p.first + static_cast<uint64_t>(begin),
             static_cast<uint64_t>(end - begin), {&own, 1});
  });
  return out;
}

void ReplayWeights::perturb(const NoiseTerm& term) {
  Update update;
  update.terms = {term};
  apply({&update, 1});
}

void ReplayWeights::release() {
  for (ReplayParameter& p : parameters_)
    p.tensor = at::empty_like(p.tensor, at::TensorOptions(at::kMeta));
}

std::vector<uint32_t> ReplayWeights::checksums() const {
  std::vector<uint32_t> found;
  for (const auto& p : parameters_) {
    const at::Tensor host = p.tensor.detach().cpu().contiguous();
    found.push_back(crc32c(host.const_data_ptr(), host.nbytes()));
  }
  return found;
}

uint32_t ReplayWeights::checksum() const {
  const std::vector<uint32_t> each = checksums();
  uint32_t crc = 0;
  for (size_t i = 0; i < each.size(); ++i)
    crc = joinedCrc32c(crc, each[i], parameters_[i].tensor.nbytes());
  return crc;
}

// The quantized base: blocks of codes with one scale each.

namespace {

constexpr int64_t kBaseBlock = 64;
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
    throw ValueError("SeedReplay: base: expected int8 or nf4, got '" + kind + "'");
  }
  at::NoGradGuard no_grad;
  at::Tensor flat = weight.detach().to(at::kFloat).flatten();
  if (!at::isfinite(flat).all().item<bool>()) {
    throw ValueError("SeedReplay: base: expected finite weights, got one with NaN or infinity");
  }
  const int64_t blocks = (flat.numel() + kBaseBlock - 1) / kBaseBlock;
  flat = at::constant_pad_nd(flat, {0, blocks * kBaseBlock - flat.numel()}).view({blocks, kBaseBlock});
  scales_ = flat.abs().amax(1);
  const at::Tensor unit = at::where(scales_ > 0, scales_, 1).unsqueeze(1);
  levels_ = levels(four_bits_, flat.device());
  const int64_t last = levels_.numel() - 1;
  const at::Tensor middles = (levels_.slice(0, 0, last) + levels_.slice(0, 1)) / 2;
  const at::Tensor codes = at::bucketize(flat / unit, middles).to(at::kByte);
  codes_ =
      four_bits_ ? codes.slice(1, 0, kBaseBlock / 2) | codes.slice(1, kBaseBlock / 2).bitwise_left_shift(4) : codes;
}

at::Tensor QuantizedBase::values() const {
  at::NoGradGuard no_grad;
  const at::Tensor codes = four_bits_ ? at::cat({codes_ & 15, codes_.bitwise_right_shift(4)}, 1) : codes_;
  const at::Tensor unit = levels_.index_select(0, codes.flatten().to(at::kInt));
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

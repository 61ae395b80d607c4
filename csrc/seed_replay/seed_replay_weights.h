#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/noise/noise.h"

namespace lowcomm {

// A tensor of the model that is perturbed and updated. Its place in the list is its number in the perturbations' key,
// so that all machines must have the same list.
struct ReplayParameter {
  std::string name;
  at::Tensor tensor;    // float32, float16 or bfloat16; on the host or, in builds with kernels, a CUDA device
  bool decayed = true;  // by the weight decay
  uint64_t first = 0;   // element of the whole tensor that this one, a shard of it, begins with
  // Shape of the whole tensor, by which machines agree on it whatever their shards are; none: the tensor is whole.
  std::optional<std::vector<int64_t>> whole = std::nullopt;

  at::IntArrayRef wholeShape() const { return whole ? at::IntArrayRef(*whole) : tensor.sizes(); }
};

// The weights that seed replay moves (Just One Byte, section 2 and algorithm 1; MeZO, algorithm 1): w <- keep·w + sum
// of factor·z, with z made again from its key (FORMAT.md, "Perturbations"). Sums are fp32, rounded once to the
// parameter's type; all bits are the same on any device, with any number of threads and however the tensor is sharded.
class ReplayWeights {
 public:
  // An iteration's update. The terms' keys have no stream yet: it is the parameter's number.
  struct Update {
    float keep = 1;  // of weights that decay: 1 - lr·weight_decay
    std::vector<NoiseTerm> terms;
  };

  // Throws TypeError for another element type, ValueError for a device that this build has no kernels for, or for a
  // shard that lies outside the whole tensor.
  ReplayWeights(std::vector<ReplayParameter> parameters, Noise noise);

  const std::vector<ReplayParameter>& parameters() const { return parameters_; }

  // Applies updates one after another, each block of the weights staying in the first-level cache for all of them: the
  // bits are those of one call an update, the traffic that of one.
  void apply(std::span<const Update> updates);

  // update() for another tensor in the place of one parameter.
  void update(const at::Tensor& w, size_t parameter, const Update& update) const;

  // w + factor·z of a parameter, a new tensor like it; w is not touched.
  at::Tensor perturbed(size_t parameter, const NoiseTerm& term) const;

  // w <- w + factor·z, all parameters in place: the paper's way, which drifts by a rounding a call.
  void perturb(const NoiseTerm& term);

  // Lets go of the tensors' memory: of a parameter, name, type and shape stay.
  void release();

  // CRC-32C of each parameter's bytes; of a shard its own.
  std::vector<uint32_t> checksums() const;
  // CRC-32C of all parameters' bytes, in their order.
  uint32_t checksum() const;

 private:
  struct Listing;

  void run(const at::Tensor& w, size_t parameter, Listing& listing) const;

  std::vector<ReplayParameter> parameters_;
  Noise noise_;
};

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
  at::Tensor
      levels_;  // float, what codes stand for in units of a block's scale: a copy at each use would wait for a GPU
  at::Tensor codes_;   // uint8: of int8 one an element, of nf4 two
  at::Tensor scales_;  // fp32, one a block
};

}  // namespace lowcomm

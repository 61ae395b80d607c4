#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "codec/scalar_rules.h"
#include "seed_replay/seed_replay_weights.h"
#include "wire/seed_replay_log.h"

namespace lowcomm {

// How projected gradients travel (Just One Byte, section 3): "logbyte" (a byte each), "log9" (nine bits), "fp16",
// "none" (fp32), or "sign1", the sign alone, in two bits: 0 for a zero, 1 for +1, 2 for no number, 3 for -1. Codes
// stand one behind another from the lowest bit on, without the blocks of the codec of that name: messages have a few.
// Thread-safe.
class EstimateCodec {
 public:
  // Throws ValueError for another name.
  explicit EstimateCodec(const std::string& name);

  const std::string& name() const { return name_; }

  // Bytes of `count` estimates.
  size_t bytes(size_t count) const { return (count * bits_ + 7) / 8; }

  // An estimate that is not finite decodes to NaN or an infinity, and no machine applies it.
  std::vector<std::byte> encode(std::span<const float> estimates) const;

  // Throws WireError: a payload of another length than bytes(count).
  std::vector<float> decode(std::span<const std::byte> payload, size_t count) const;

 private:
  uint32_t code(float estimate) const;
  float value(uint32_t code) const;

  std::string name_;
  uint32_t bits_;                       // of a code
  const ScalarTable* table_ = nullptr;  // of logbyte and log9
};

// Options that are equal on every machine of a run.
struct SeedReplayOptions {
  Noise noise = Noise::rademacher;
  std::string codec = "logbyte";  // of estimates (EstimateCodec)
  bool mean = false;              // lr / k for k estimates in an iteration; else lr / sqrt(k), the paper's
  uint64_t seed = 0;              // of the run
  uint32_t pool = 0;              // directions there are in all (FedKSeed); 0: as many as samples
  std::string agreed;             // other things that are equal on all machines: part of agreement()
  std::string base;  // "int8" or "nf4": weights are kept so, and their change as the pool's sums; "": as they are
};

// Zeroth-order fine-tuning that sends a byte a gradient: Zelikman et al., Just One Byte (per Gradient), 2023, after
// MeZO (Malladi et al., 2023). A machine measures how the loss changes along directions that it makes of a seed, and
// sends the projections alone; every machine makes the same directions again and takes the same step:
//
//   w <- w - lr / sqrt(k) · sum of decoded(estimate)·z(seed(run, machine, iteration, sample)),
//
// in the order of machines and samples, with the sum in fp32 (kernels/noise/noise.h). Machines apply records;
// records one behind another are the log, from which a machine with the first weights gets to the present ones.
//
// No threads of its own and no locks: one caller at a time. Whatever throws has changed nothing.
class SeedReplay {
 public:
  // Throws ValueError, TypeError: options or parameters that will not do, a base without a pool or with Gaussian noise.
  SeedReplay(std::vector<ReplayParameter> parameters, SeedReplayOptions options);

  // The iteration that comes next, counted from 0.
  uint64_t iteration() const { return iteration_; }
  // After its weights were set to those before iteration `iteration`, by a caller that restores a snapshot. Drops the
  // log.
  void setIteration(uint64_t iteration);

  const SeedReplayOptions& options() const { return options_; }

  // The run that weights and records belong to, as text: version of this format, options, names, shapes and types.
  std::string description() const;
  // All that must be equal on all machines: that, and what the caller adds.
  std::string agreement() const;

  // ---- the present iteration's directions ----
  NoiseTerm direction(uint64_t machine, uint64_t sample, float factor) const;
  // w + factor·z of a parameter as a new tensor of its type; factor 0: w, of a quantized base what it stands for.
  at::Tensor perturbed(size_t parameter, uint64_t machine, uint64_t sample, float factor) const;
  // All parameters in place. ValueError with a quantized base.
  void perturb(uint64_t machine, uint64_t sample, float factor);

  // ---- messages and records ----
  // Throws ValueError: bytes that are no message of this machine and of the present iteration, with a whole payload.
  void checkMessage(uint64_t machine, std::span<const std::byte> bytes) const;
  // Throws ValueError: rates that no record may have: not finite, or a weight decay with a quantized base.
  void checkRates(float lr, float weight_decay) const;
  // A machine's message of the present iteration. ValueError: more than 65535 estimates.
  std::vector<std::byte> message(uint64_t machine, std::span<const float> estimates) const;
  // The present iteration's record of machines' messages, in any order. ValueError: one of another iteration, with
  // another length or checksum than it must have, or two of one machine; a rate that apply() would refuse.
  std::vector<std::byte> record(const std::vector<std::vector<std::byte>>& messages, float lr,
                                float weight_decay) const;

  // Applies the records of the present iteration and those after it; returns how many estimates took part. ValueError
  // where one is spoilt or of another iteration, before anything is changed.
  uint64_t apply(std::span<const std::byte> records);

  // The records that were applied since construction or setIteration(), or from the iteration on that forgetLog() was
  // told last.
  const std::vector<std::byte>& log() const { return log_; }
  // The records in it of iterations from `first` on.
  std::span<const std::byte> logFrom(uint64_t first) const;
  void forgetLog(uint64_t before);

  // CRC-32C of the weights' bytes, in the parameters' order; with a quantized base of its bytes and the pool's sums.
  // Of shards it is the checksum of these alone: joined with the other shards' checksums it is the whole tensors'.
  uint32_t checksum() const;
  // CRC-32C of each parameter, or shard of one. ValueError with a quantized base.
  std::vector<uint32_t> checksums() const;
  // Sums of factors by direction of the pool, in fp32; empty without a quantized base.
  const std::vector<float>& sums() const { return sums_; }
  void setSums(std::vector<float> sums);

 private:
  uint64_t seedOf(uint64_t machine, uint64_t iteration, uint64_t sample) const;
  uint32_t pooled(uint64_t machine, uint64_t iteration, uint64_t sample) const;
  std::vector<NoiseTerm> poolTerms() const;
  void checkRates(uint64_t iteration, float lr, float weight_decay) const;
  std::vector<ReplayRecord> checked(std::span<const std::byte> records) const;

  SeedReplayOptions options_;
  EstimateCodec codec_;
  ReplayWeights weights_;
  std::vector<QuantizedBase> bases_;  // by parameter, in place of its weights
  std::vector<float> sums_;
  uint64_t iteration_ = 0;
  std::vector<std::byte> log_;
};

}  // namespace lowcomm

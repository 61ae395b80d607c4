#include "seed_replay/seed_replay.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/hashes.h"
#include "base/narrow_float.h"

namespace lowcomm {
namespace {

// The machine number of the pool's seeds, which belong to no machine and no iteration.
constexpr uint64_t kPoolMachine = std::numeric_limits<uint64_t>::max();

// Not fused, not reordered: the bits are the same on every machine (this library is compiled without contraction).
float factorOf(float lr, bool mean, size_t k, float estimate) {
  const float count = static_cast<float>(k);
  return -(lr / (mean ? count : std::sqrt(count)) * estimate);
}

}  // namespace

EstimateCodec::EstimateCodec(const std::string& name) : name_(name) {
  if (name == "logbyte" || name == "log9") {
    table_ = name == "logbyte" ? &kLogByteTable : &kLog9Table;
    bits_ = table_->bits;
  } else if (name == "fp16" || name == "none" || name == "sign1") {
    bits_ = name == "fp16" ? 16 : name == "none" ? 32 : 2;
  } else {
    throw ValueError("SeedReplay: codec: expected logbyte, log9, fp16, none or sign1, got '" + name + "'");
  }
}

uint32_t EstimateCodec::code(float estimate) const {
  if (table_) return scalarCode(*table_, estimate);
  if (bits_ == 32) return floatBits(estimate);
  if (bits_ == 16) return floatToFloat16(estimate);
  return !std::isfinite(estimate) ? 2 : estimate == 0 ? 0 : estimate > 0 ? 1 : 3;
}

float EstimateCodec::value(uint32_t code) const {
  if (table_) return scalarValue(*table_, code);
  if (bits_ == 32) return floatOf(code);
  if (bits_ == 16) return float16ToFloat(static_cast<uint16_t>(code));
  constexpr float kSigns[] = {0.0f, 1.0f, std::numeric_limits<float>::quiet_NaN(), -1.0f};
  return kSigns[code];
}

std::vector<std::byte> EstimateCodec::encode(std::span<const float> estimates) const {
  std::vector<std::byte> out(bytes(estimates.size()));
  for (size_t i = 0; i < estimates.size(); ++i) {
    const uint64_t shifted = uint64_t{code(estimates[i])} << (i * bits_ % 8);
    for (size_t b = i * bits_ / 8; b < ((i + 1) * bits_ + 7) / 8; ++b)
      out[b] |= static_cast<std::byte>(shifted >> (8 * (b - i * bits_ / 8)));
  }
  return out;
}

std::vector<float> EstimateCodec::decode(std::span<const std::byte> payload, size_t count) const {
  if (payload.size() != bytes(count)) {
    throw WireError("SeedReplay: payload of " + std::to_string(count) + " estimates in " + name_ + ": expected " +
                    std::to_string(bytes(count)) + " bytes, got " + std::to_string(payload.size()));
  }
  std::vector<float> out(count);
  for (size_t i = 0; i < count; ++i) {
    uint64_t word = 0;
    for (size_t b = i * bits_ / 8; b < ((i + 1) * bits_ + 7) / 8; ++b)
      word |= std::to_integer<uint64_t>(payload[b]) << (8 * (b - i * bits_ / 8));
    out[i] = value(static_cast<uint32_t>(word >> (i * bits_ % 8) & ((uint64_t{1} << bits_) - 1)));
  }
  return out;
}

SeedReplay::SeedReplay(std::vector<ReplayParameter> parameters, SeedReplayOptions options)
    : options_(std::move(options)), codec_(options_.codec), weights_(std::move(parameters), options_.noise) {
  if (weights_.parameters().empty()) {
    throw ValueError("SeedReplay: parameters: expected one or more that require gradients, got none");
  }
  if (options_.base.empty()) return;
  if (options_.pool == 0) {
    throw ValueError("SeedReplay: base '" + options_.base +
                     "': expected pool=K with it, as what a base that is never written has moved by is kept as K sums; "
                     "got no pool");
  }
  if (options_.noise == Noise::gaussian) {
    throw ValueError(
        "SeedReplay: base '" + options_.base +
        "': expected noise rademacher, got gaussian: every use of a weight makes all directions of the pool "
        "again, and a Gaussian one takes some twenty times as long");
  }
  for (const auto& p : weights_.parameters()) {
    if (p.whole) {
      throw ValueError("SeedReplay: base '" + options_.base + "': expected whole parameters, got a shard of '" +
                       p.name + "'");
    }
    bases_.emplace_back(p.tensor, options_.base);
  }
  weights_.release();
  sums_.assign(options_.pool, 0.0f);
}

void SeedReplay::setIteration(uint64_t iteration) {
  iteration_ = iteration;
  log_.clear();
}

std::span<const std::byte> SeedReplay::logFrom(uint64_t first) const {
  return ReplayRecords(log_).from(first);
}

void SeedReplay::forgetLog(uint64_t before) {
  const auto rest = logFrom(before);
  log_.erase(log_.begin(), log_.end() - static_cast<std::ptrdiff_t>(rest.size()));
}

void SeedReplay::setSums(std::vector<float> sums) {
  if (sums.size() != sums_.size()) {
    throw ValueError("SeedReplay: sums: expected " + std::to_string(sums_.size()) + ", got " +
                     std::to_string(sums.size()));
  }
  sums_ = std::move(sums);
}

std::string SeedReplay::description() const {
  std::string text = "seed replay 1";
  text += options_.noise == Noise::gaussian ? " gaussian" : " rademacher";
  text += " codec=" + options_.codec + " lr_scale=" + (options_.mean ? "mean" : "sqrt");
  text += " seed=" + std::to_string(options_.seed) + " pool=" + std::to_string(options_.pool);
  text += " base=" + (options_.base.empty() ? "none" : options_.base);
  for (const auto& p : weights_.parameters()) {
    text += " " + p.name + ":" + c10::toString(p.tensor.scalar_type()) + "[";
    for (const int64_t size : p.wholeShape())
      text += std::to_string(size) + ",";
    text += p.decayed ? "]" : "]!";
  }
  return text;
}

std::string SeedReplay::agreement() const {
  std::string text = options_.agreed;
  text += ' ';
  return text += description();
}

uint32_t SeedReplay::pooled(uint64_t machine, uint64_t iteration, uint64_t sample) const {
  return static_cast<uint32_t>(noiseSeed(options_.seed, machine, iteration, sample) % options_.pool);
}

uint64_t SeedReplay::seedOf(uint64_t machine, uint64_t iteration, uint64_t sample) const {
  if (options_.pool == 0) return noiseSeed(options_.seed, machine, iteration, sample);
  return noiseSeed(options_.seed, kPoolMachine, 0, pooled(machine, iteration, sample));
}

NoiseTerm SeedReplay::direction(uint64_t machine, uint64_t sample, float factor) const {
  return {{seedOf(machine, iteration_, sample), 0, 0}, factor};
}

std::vector<NoiseTerm> SeedReplay::poolTerms() const {
  std::vector<NoiseTerm> terms;
  for (uint32_t j = 0; j < options_.pool; ++j) {
    if (sums_[j] != 0) terms.push_back({{noiseSeed(options_.seed, kPoolMachine, 0, j), 0, 0}, sums_[j]});
  }
  return terms;
}

at::Tensor SeedReplay::perturbed(size_t parameter, uint64_t machine, uint64_t sample, float factor) const {
  if (bases_.empty()) {
    if (factor == 0) return weights_.parameters().at(parameter).tensor.detach().clone();
    return weights_.perturbed(parameter, direction(machine, sample, factor));
  }
  const ReplayParameter& p = weights_.parameters().at(parameter);
  ReplayWeights::Update update;
  update.terms = poolTerms();
  if (factor != 0) update.terms.push_back(direction(machine, sample, factor));
  const at::Tensor values = bases_[parameter].values();
  weights_.update(values, parameter, update);
  return values.to(p.tensor.scalar_type());
}

void SeedReplay::perturb(uint64_t machine, uint64_t sample, float factor) {
  if (!bases_.empty()) {
    throw ValueError("SeedReplay: base '" + options_.base + "': expected perturbations where weights are used, as it " +
                     "is never written, got one in place");
  }
  weights_.perturb(direction(machine, sample, factor));
}

std::vector<std::byte> SeedReplay::message(uint64_t machine, std::span<const float> estimates) const {
  if (estimates.size() > std::numeric_limits<uint16_t>::max()) {
    throw ValueError("SeedReplay: message: expected 65535 estimates or fewer, got " + std::to_string(estimates.size()));
  }
  const std::vector<std::byte> payload = codec_.encode(estimates);
  return writeReplayMessage({machine, iteration_, static_cast<uint16_t>(estimates.size()), payload});
}

std::vector<std::byte> SeedReplay::record(const std::vector<std::vector<std::byte>>& messages, float lr,
                                          float weight_decay) const {
  ReplayRecord record{iteration_, lr, weight_decay, {}};
  checkRates(lr, weight_decay);
  for (const auto& bytes : messages) {
    try {
      const ReplayMessage message = readReplayMessage(bytes);
      if (message.iteration != iteration_) {
        throw ValueError("seed replay message of machine " + std::to_string(message.machine) + ": expected iteration " +
                         std::to_string(iteration_) + ", got " + std::to_string(message.iteration));
      }
      codec_.decode(message.payload, message.count);  // its length
      record.entries.push_back({message.machine, message.count, message.payload});
    } catch (const WireError& error) {
      throw ValueError(error.what());
    }
  }
  std::sort(record.entries.begin(), record.entries.end(),
            [](const auto& a, const auto& b) { return a.machine < b.machine; });
  const auto twice = std::adjacent_find(record.entries.begin(), record.entries.end(),
                                        [](const auto& a, const auto& b) { return a.machine == b.machine; });
  if (twice != record.entries.end()) {
    throw ValueError("seed replay record: expected one message a machine, got two of machine " +
                     std::to_string(twice->machine));
  }
  return writeReplayRecord(record);
}

void SeedReplay::checkMessage(uint64_t machine, std::span<const std::byte> bytes) const {
  try {
    const ReplayMessage message = readReplayMessage(bytes);
    if (message.machine != machine || message.iteration != iteration_) {
      throw ValueError("SeedReplay: message: expected one of machine " + std::to_string(machine) + " and iteration " +
                       std::to_string(iteration_) + ", got one of machine " + std::to_string(message.machine) +
                       " and iteration " + std::to_string(message.iteration));
    }
    codec_.decode(message.payload, message.count);  // checks its length
  } catch (const WireError& error) {
    throw ValueError(error.what());
  }
}

void SeedReplay::checkRates(float lr, float weight_decay) const {
  checkRates(iteration_, lr, weight_decay);
}

void SeedReplay::checkRates(uint64_t iteration, float lr, float weight_decay) const {
  if (!std::isfinite(lr) || !std::isfinite(weight_decay)) {
    throw ValueError("seed replay record of iteration " + std::to_string(iteration) +
                     ": expected a finite learning rate and weight decay, got " + std::to_string(lr) + " and " +
                     std::to_string(weight_decay));
  }
  if (weight_decay != 0 && !bases_.empty()) {
    throw ValueError("SeedReplay: base '" + options_.base + "': expected weight_decay=0, got " +
                     std::to_string(weight_decay));
  }
}

std::vector<ReplayRecord> SeedReplay::checked(std::span<const std::byte> bytes) const {
  try {
    std::vector<ReplayRecord> records = ReplayRecords(bytes).read();
    if (!records.empty() && records[0].iteration != iteration_) {
      throw ValueError("seed replay record: expected iteration " + std::to_string(iteration_) + ", got " +
                       std::to_string(records[0].iteration));
    }
    for (const ReplayRecord& record : records)
      checkRates(record.iteration, record.lr, record.weight_decay);
    return records;
  } catch (const WireError& error) {
    throw ValueError(error.what());
  }
}

uint64_t SeedReplay::apply(std::span<const std::byte> bytes) {
  const std::vector<ReplayRecord> records = checked(bytes);
  std::vector<ReplayWeights::Update> updates;
  std::vector<float> sums = sums_;
  uint64_t taken = 0;
  for (const ReplayRecord& record : records) {
    std::vector<std::pair<uint64_t, uint64_t>> whose;  // machine and sample
    std::vector<float> estimates;
    for (const auto& entry : record.entries) {
      std::vector<float> decoded;
      try {
        decoded = codec_.decode(entry.payload, entry.count);
      } catch (const WireError& error) {
        throw ValueError(error.what());
      }
      for (size_t sample = 0; sample < decoded.size(); ++sample) {
        if (!std::isfinite(decoded[sample])) continue;  // its loss was none: nobody applies it
        whose.emplace_back(entry.machine, sample);
        estimates.push_back(decoded[sample]);
      }
    }
    ReplayWeights::Update update;
    if (record.weight_decay != 0) update.keep = 1.0f - record.lr * record.weight_decay;
    for (size_t i = 0; i < estimates.size(); ++i) {
      const auto [machine, sample] = whose[i];
      const float factor = factorOf(record.lr, options_.mean, estimates.size(), estimates[i]);
      if (bases_.empty()) {
        update.terms.push_back({{seedOf(machine, record.iteration, sample), 0, 0}, factor});
      } else {
        sums[pooled(machine, record.iteration, sample)] += factor;
      }
    }
    taken += estimates.size();
    updates.push_back(std::move(update));
  }
  log_.insert(log_.end(), bytes.begin(), bytes.end());  // what may throw comes before what may not
  if (bases_.empty()) weights_.apply(updates);
  sums_ = std::move(sums);
  iteration_ += records.size();
  return taken;
}

uint32_t SeedReplay::checksum() const {
  if (bases_.empty()) return weights_.checksum();
  uint32_t crc = 0;
  for (const QuantizedBase& base : bases_)
    crc = base.checksum(crc);
  return crc32c(sums_.data(), sums_.size() * sizeof(float), crc);
}

std::vector<uint32_t> SeedReplay::checksums() const {
  if (!bases_.empty()) {
    throw ValueError("SeedReplay: base '" + options_.base + "': expected whole weights, got a checksum a parameter");
  }
  return weights_.checksums();
}

}  // namespace lowcomm

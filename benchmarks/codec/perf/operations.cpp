#include "operations.h"

#include <algorithm>
#include <memory>
#include <random>
#include <span>

#include "base/hashes.h"
#include "codec/fused.h"
#include "kernels/noise/noise.h"
#include "streams.h"

namespace lowcomm {
namespace {

constexpr size_t kCall = size_t{1} << 16;  // elements of one timed call: a chunk of 256 KiB of fp32
constexpr size_t kSeeds = 16;
constexpr size_t kRanks = 4;

constexpr const char* kOfAdd = "of in-place add";
constexpr const char* kOfTwelve = "of 12 bytes an element at in-place add's rate";
constexpr const char* kOfPasses = "times as fast as 16 passes";
constexpr const char* kGigabytes = "GB/s";

std::shared_ptr<const Codec> codecOf(const std::string& text, const KernelTable& form) {
  return makeCodec(CodecSpec::parse(text), form);
}

class Operations {
 public:
  Operations(const Options& options, const std::function<void(const Operation&)>& done)
      : options_(options),
        done_(done),
        calls_(std::max<size_t>(1, (options.mib << 18) / kCall)),
        x_(allocate<float>(calls_ * kCall)),
        y_(allocate<float>(calls_ * kCall)),
        payload_(allocate<std::byte>(calls_ * kCall)) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < calls_ * kCall; ++i)
      x_[i] = i < size_t{1} << 20 ? normal(generator) : x_[i - (size_t{1} << 20)];
    for (uint64_t k = 0; k < kSeeds; ++k)
      terms_.push_back({{noiseSeed(1, 0, 0, k), 0, 0}, 1e-6f});
  }

  void measure(const KernelTable& form) {
    perturb(form, Noise::rademacher, "rademacher", {.85, .90}, {3.5, 4}, calls_);
    // Bound by arithmetic, memory or not: an eighth of it says as much. Seeds have nothing to share but the pass over
    // memory, which is hidden already.
    perturb(form, Noise::gaussian, "gaussian", {0, 0}, {0, 0}, std::max<size_t>(1, calls_ / 8));
    for (const char* text : {"minmax4:bucket=512", "minmax4:bucket=1024", "sym4:bucket=1024"})
      feedback(form, text);
    sum(form);
  }

  void checksum() {
    if (!wanted("crc32c")) return;
    const double seconds = time(calls_, [&](size_t i) { sink_ = crc32c(x_.get() + i * kCall, kCall * sizeof(float)); });
    const double rate = static_cast<double>(calls_ * kCall) * 4 / seconds * 1e-9;
    report({"-", "crc32c", rate, rate, kGigabytes, 10});
  }

  std::vector<Operation> measured;

 private:
  void feedback(const KernelTable& form, const std::string& text) {
    const std::string name = "feedback " + text;
    if (!wanted(name)) return;
    FusedCodec fused(codecOf(text, form));
    const size_t bytes = fused.codec().encodedBytes(kCall, DType::float32);
    against(form, name, calls_, 1.5, kOfTwelve, {0, 0}, [&](size_t i) {
      fused.encodeFeedback({payload_.get() + i * bytes, bytes}, {x_.get() + i * kCall, DType::float32},
                           {y_.get() + i * kCall, DType::float32}, i * kCall, kCall, {});
    });
  }

  void perturb(const KernelTable& form, Noise noise, const std::string& kind, Floor one, Floor many, size_t calls) {
    const auto add = [&](size_t i, size_t seeds) {
      float* y = y_.get() + i * kCall;
      addNoise(form, noise, y, y, DType::float32, i * kCall, kCall, std::span(terms_).first(seeds));
    };
    const std::string one_seed = kind + " axpy", many_seeds = kind + " 16 seeds";
    if (!wanted(one_seed) && !wanted(many_seeds)) return;
    const double pass = against(form, one_seed, calls, 1, kOfAdd, one, [&](size_t i) { add(i, 1); });
    const double fused = time(calls, [&](size_t i) { add(i, kSeeds); });
    report({form.name, many_seeds, rate(calls, fused), kSeeds * pass / fused, kOfPasses, many.of(form.name)});
  }

  // Four ranks' payloads, summed and encoded again.
  void sum(const KernelTable& form) {
    const std::string name = "sum of 4, encoded minmax4:bucket=512";
    if (!wanted(name)) return;
    FusedCodec fused(codecOf("minmax4:bucket=512", form));
    const size_t bytes = fused.codec().encodedBytes(kCall, DType::float32), whole = (kRanks + 1) * bytes;
    const size_t calls = std::min(calls_, calls_ * kCall / whole);
    const auto place = [&](size_t i, size_t k) {
      return std::span<std::byte>(payload_.get() + i * whole + k * bytes, bytes);
    };
    const Draws draws{};
    for (size_t i = 0; i < calls; ++i) {
      for (size_t k = 0; k < kRanks; ++k)
        fused.codec().encode(place(i, k), x_.get() + i * kCall, DType::float32, 0, kCall, draws);
    }
    against(form, name, calls, 1, kOfAdd, {0, 0}, [&](size_t i) {
      Contribution all[kRanks];
      for (size_t k = 0; k < kRanks; ++k)
        all[k].payload = place(i, k);
      fused.encodeSum(place(i, kRanks), y_.get() + i * kCall, DType::float32, all, kRanks, 0, kCall, draws);
    });
  }

  bool wanted(const std::string& name) const { return name.find(options_.only) != std::string::npos; }

  double rate(size_t calls, double seconds) const { return static_cast<double>(calls * kCall) * 4 / seconds * 1e-9; }

  template <class F>
  double time(size_t calls, F&& call) {
    Fastest own(calls);
    for (int r = 0; r < options_.repetitions; ++r)
      own.pass(call);
    return own.seconds();
  }

  // Next to in-place addition over as many elements, which takes `share` of the bound; with and without prefetches.
  template <class F>
  double against(const KernelTable& form, const std::string& name, size_t calls, double share, const char* what,
                 Floor floor, F&& call) {
    Fastest own(calls), bound(calls);
    for (int r = 0; r < options_.repetitions; ++r) {
      bound.pass([&](size_t i) { streams::addInPlace<false>(y_.get() + i * kCall, kCall, 1e-9f); });
      bound.pass([&](size_t i) { streams::addInPlace<true>(y_.get() + i * kCall, kCall, 1e-9f); });
      own.pass(call);
    }
    report({form.name, name, rate(calls, own.seconds()), share * bound.seconds() / own.seconds(), what,
            floor.of(form.name)});
    return own.seconds();
  }

  void report(Operation operation) {
    done_(operation);
    measured.push_back(std::move(operation));
  }

  const Options& options_;
  const std::function<void(const Operation&)>& done_;
  size_t calls_;
  Buffer<float> x_, y_;
  Buffer<std::byte> payload_;
  std::vector<NoiseTerm> terms_;
  volatile uint32_t sink_ = 0;
};

}  // namespace

std::vector<Operation> measureOperations(const Options& options, const std::vector<const KernelTable*>& forms,
                                         const std::function<void(const Operation&)>& done) {
  Operations operations(options, done);
  for (const KernelTable* form : forms)
    operations.measure(*form);
  operations.checksum();
  return operations.measured;
}

}  // namespace lowcomm

// Speed of the CUDA kernels on one device, each row beside a copy of as many bytes. Definitions: README.md,
// "cuda_perf".
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/family.h"
#include "codec/fused.h"
#include "codec/grid.h"
#include "codec/level_table.h"
#include "codec/topk.h"
#include "cuda/cast.h"
#include "cuda/fused.h"
#include "cuda/grid.h"
#include "cuda/noise.h"
#include "cuda/scalar.h"
#include "cuda/topk.h"
#include "cuda/uncut.h"
#include "kernels/half.h"
#include "kernels/noise.h"
#include "kernels/table.h"

using namespace lowcomm;

namespace {

void must(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Device memory, filled with zeros.
class Memory {
 public:
  explicit Memory(size_t bytes) {
    must(cudaMalloc(&at_, bytes));
    must(cudaMemset(at_, 0, bytes));
  }
  ~Memory() { static_cast<void>(cudaFree(at_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* get() const { return at_; }

 private:
  void* at_ = nullptr;
};

// Milliseconds on the device of what `enqueue` puts on the default stream.
float milliseconds(const std::function<void()>& enqueue) {
  struct Event {
    cudaEvent_t event;
    Event() { must(cudaEventCreate(&event)); }
    ~Event() { static_cast<void>(cudaEventDestroy(event)); }
  };
  const Event start, end;
  must(cudaEventRecord(start.event));
  enqueue();
  must(cudaEventRecord(end.event));
  must(cudaEventSynchronize(end.event));
  float ms;
  must(cudaEventElapsedTime(&ms, start.event, end.event));
  return ms;
}

struct Measured {
  double gigabytes_a_second;   // read and written, by the median time
  double least, median, most;  // percent of the copy that ran just before
};

// A copy of half of `bytes` reads and writes as many as `enqueue` does.
Measured measure(size_t bytes, int repetitions, const Memory& from, const Memory& to,
                 const std::function<void()>& enqueue) {
  const auto copy = [&] { must(cudaMemcpyAsync(to.get(), from.get(), bytes / 2, cudaMemcpyDeviceToDevice, nullptr)); };
  milliseconds(copy);
  milliseconds(enqueue);
  std::vector<double> percents, times;
  for (int i = 0; i < repetitions; ++i) {
    const double copied = milliseconds(copy), own = milliseconds(enqueue);
    percents.push_back(100 * copied / own);
    times.push_back(own);
  }
  std::sort(percents.begin(), percents.end());
  std::sort(times.begin(), times.end());
  return {static_cast<double>(bytes) * 1e-6 / times[times.size() / 2], percents.front(), percents[percents.size() / 2],
          percents.back()};
}

struct Row {
  std::string codec, dtype, loop;
  Measured measured;
  double bound;  // percent
  bool same;     // bytes or values as on the host

  bool pass() const { return same && measured.median >= bound; }
};

struct Options {
  size_t mib = 256;
  int repetitions = 21;
  std::string only, json;
};

std::vector<std::byte> onHost(const Memory& memory, size_t bytes) {
  std::vector<std::byte> host(bytes);
  must(cudaMemcpy(host.data(), memory.get(), bytes, cudaMemcpyDefault));
  return host;
}

std::vector<std::byte> elements(size_t count, DType dtype) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> some(1 << 16);
  for (float& x : some)
    x = normal(generator);
  std::vector<std::byte> all(count * itemBytes(dtype));
  for (size_t i = 0; i < count; ++i) {
    const float x = some[i % some.size()] * static_cast<float>(1 + i / some.size() % 7);
    if (dtype == DType::float32) reinterpret_cast<float*>(all.data())[i] = x;
    if (dtype == DType::bfloat16) reinterpret_cast<uint16_t*>(all.data())[i] = floatToBfloat16(x);
    if (dtype == DType::float16) reinterpret_cast<uint16_t*>(all.data())[i] = floatToFloat16(x);
  }
  return all;
}

LevelTable evenLevels(int bits) {
  std::vector<float> values(size_t{1} << bits);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i) / static_cast<float>(values.size() - 1);
  return LevelTable(values);
}

// The kernels of a codec's kind, for a run of so many elements.
struct Calls {
  std::function<void(void* payload, const void* x, uint32_t* refused)> encode;
  std::function<void(void* y, const void* payload, uint32_t* refused)> decode;
  std::function<void(float* acc, const void* payload, uint32_t* refused)> decode_add;
};

Calls callsOf(const CodecSpec& codec, DType dtype, uint64_t count, const LevelTable* levels) {
  const cuda::GridRun grid{codec, dtype, count, levels};
  const cuda::PlainRun plain{codec, dtype, count};
  if (isGrid(codec.id)) {
    return {[=](void* p, const void* x, uint32_t* r) { cuda::encodeGrid({}, grid, p, x, 0, {1, 2, 3}, r); },
            [=](void* y, const void* p, uint32_t* r) { cuda::decodeGrid({}, grid, y, p, r); },
            [=](float* acc, const void* p, uint32_t* r) { cuda::decodeAddGrid({}, grid, acc, p, r); }};
  }
  if (isCast(codec.id)) {
    return {[=](void* p, const void* x, uint32_t* r) { cuda::encodeCast({}, plain, p, x, 0, {1, 2, 3}, r); },
            [=](void* y, const void* p, uint32_t* r) { cuda::decodeCast({}, plain, y, p, r); },
            [=](float* acc, const void* p, uint32_t* r) { cuda::decodeAddCast({}, plain, acc, p, r); }};
  }
  return {[=](void* p, const void* x, uint32_t*) { cuda::encodeScalar({}, plain, p, x); },
          [=](void* y, const void* p, uint32_t* r) { cuda::decodeScalar({}, plain, y, p, r); },
          [=](float* acc, const void* p, uint32_t* r) { cuda::decodeAddScalar({}, plain, acc, p, r); }};
}

// Whether one of two neighbouring codes is drawn for each element.
bool isStochastic(const CodecSpec& codec) {
  const GridFamily* family = gridFamily(codec.id);
  return codec.stochastic || (family != nullptr && family->rounding == Rounding::stochastic);
}

std::vector<std::byte> bytesOf(const std::vector<float>& x) {
  const auto* bytes = reinterpret_cast<const std::byte*>(x.data());
  return {bytes, bytes + x.size() * 4};
}

void measureCodec(std::vector<Row>& rows, const std::string& text, DType dtype, const Options& options) {
  const CodecSpec spec = CodecSpec::parse(text);
  const std::optional<LevelTable> levels = needsTable(spec) ? std::optional(evenLevels(spec.bits)) : std::nullopt;
  std::shared_ptr<const Codec> codec = makeCodec(spec);
  if (levels) codec = codec->with(*levels);
  const size_t count = (options.mib << 20) / 4;
  const size_t raw = count * itemBytes(dtype), sent = codec->encodedBytes(count, dtype);
  const std::vector<std::byte> source = elements(count, dtype);
  std::vector<std::byte> expected(sent), values(raw);
  codec->encode(expected, source.data(), dtype, 0, count, {1, 2, 3});
  codec->decode(values.data(), dtype, expected, 0, count);

  const Calls calls = callsOf(codec->spec(), dtype, count, levels ? &*levels : nullptr);
  const Memory x(raw), payload(sent), refused(4);
  const Memory from(count * 8), to(count * 8);  // as much as any row moves
  auto* flag = static_cast<uint32_t*>(refused.get());
  must(cudaMemcpy(x.get(), source.data(), raw, cudaMemcpyDefault));
  const auto add = [&](const char* loop, Measured measured, double bound, bool same) {
    rows.push_back({text, dtypeName(dtype), loop, measured, bound, same});
  };

  const Measured encode =
      measure(raw + sent, options.repetitions, from, to, [&] { calls.encode(payload.get(), x.get(), flag); });
  add("encode", encode, isStochastic(codec->spec()) ? 70 : 80, onHost(payload, sent) == expected);
  const Measured decode =
      measure(raw + sent, options.repetitions, from, to, [&] { calls.decode(x.get(), payload.get(), flag); });
  add("decode", decode, 80, onHost(x, raw) == values);

  // Into zeros: once for the sum to be that of one payload, then for the time.
  const Memory acc(count * 4);
  auto* sums = static_cast<float*>(acc.get());
  calls.decode_add(sums, payload.get(), flag);
  std::vector<float> sum(count);
  codec->decodeAdd(sum.data(), dtype, expected, 0, count);
  const bool same = onHost(acc, count * 4) == bytesOf(sum);
  const Measured adding =
      measure(count * 8 + sent, options.repetitions, from, to, [&] { calls.decode_add(sums, payload.get(), flag); });
  add("decode-add", adding, 80, same && onHost(refused, 4) == std::vector<std::byte>(4));
}

// What is fused with a grid codec, of fp32 elements and states: a state is read and written with each, and a sum is of
// own elements and three payloads.
void measureFused(std::vector<Row>& rows, const std::string& text, const Options& options) {
  const std::shared_ptr<const Codec> codec = makeCodec(CodecSpec::parse(text));
  FusedCodec fused(codec);
  const size_t count = (options.mib << 20) / 4, raw = count * 4, sent = codec->encodedBytes(count, DType::float32);
  const std::vector<std::byte> source = elements(count, DType::float32);
  const Draws draws{1, 2, 3};
  const PhiloxKey key{1, 2, 3};
  const cuda::GridRun run{codec->spec(), DType::float32, count};

  const Memory x(raw), payload(sent), state(raw), refused(4), from(raw * 2), to(raw * 2);
  auto* flag = static_cast<uint32_t*>(refused.get());
  must(cudaMemcpy(x.get(), source.data(), raw, cudaMemcpyDefault));
  const double bound = isStochastic(codec->spec()) ? 70 : 80;
  const auto measureRow = [&](const char* loop, size_t bytes, const Memory& result,
                              const std::vector<std::byte>& expected_payload, const std::vector<float>& expected,
                              const std::function<void()>& enqueue) {
    enqueue();
    const bool same = onHost(payload, sent) == expected_payload && onHost(result, raw) == bytesOf(expected) &&
                      onHost(refused, 4) == std::vector<std::byte>(4);
    rows.push_back({text, "float32", loop, measure(bytes, options.repetitions, from, to, enqueue), bound, same});
  };

  std::vector<std::byte> expected(sent);
  const cuda::FusedState kept{state.get(), state.get(), DType::float32};
  for (const bool delta : {true, false}) {
    std::vector<float> after(count);
    const auto host = delta ? &FusedCodec::encodeDelta : &FusedCodec::encodeFeedback;
    (fused.*host)(expected, {source.data(), DType::float32}, {after.data(), DType::float32}, 0, count, draws);
    must(cudaMemset(state.get(), 0, raw));
    const auto there = delta ? cuda::encodeDelta : cuda::encodeFeedback;
    measureRow(delta ? "delta" : "feedback", 3 * raw + sent, state, expected, after,
               [&] { there({}, run, payload.get(), x.get(), kept, 0, key, flag); });
  }

  const Memory peer(sent);
  must(cudaMemcpy(peer.get(), expected.data(), sent, cudaMemcpyDefault));
  std::vector<cuda::FusedTerm> terms(4, cuda::FusedTerm{peer.get()});
  std::vector<Contribution> same_terms(4, Contribution{expected, nullptr});
  terms[1] = {nullptr, x.get()};
  same_terms[1] = {{}, source.data()};
  std::vector<std::byte> total(sent);
  std::vector<float> out(count);
  fused.encodeSum(total, out.data(), DType::float32, same_terms, 4, 0, count, draws);
  measureRow("sum of 4", 2 * raw + 4 * sent, state, total, out,
             [&] { cuda::encodeSum({}, run, payload.get(), state.get(), terms, 4, 0, key, flag); });
}

// x += the sum of `terms` perturbations of a seed each.
void measureNoise(std::vector<Row>& rows, Noise noise, size_t terms, double bound, const Options& options) {
  size_t forms = 0;
  const KernelTable* const* form = kernelForms(&forms);
  const size_t count = (options.mib << 20) / 4, checked = std::min<size_t>(count, 1 << 20);
  std::vector<NoiseTerm> of(terms);
  for (size_t i = 0; i < terms; ++i)
    of[i] = {{noiseSeed(1, 2, 3, i), 4, 0}, 0.1f * static_cast<float>(i + 1)};
  std::vector<float> expected(checked);
  addNoise(*form[forms - 1], noise, expected.data(), expected.data(), DType::float32, 0, checked, of);

  const Memory x(count * 4), there(terms * sizeof(NoiseTerm)), from(count * 8), to(count * 8);
  must(cudaMemcpy(there.get(), of.data(), terms * sizeof(NoiseTerm), cudaMemcpyDefault));
  const auto add = [&] {
    cuda::addNoise({}, noise, x.get(), x.get(), DType::float32, 0, count, static_cast<const NoiseTerm*>(there.get()),
                   terms);
  };
  add();
  const auto* bytes = reinterpret_cast<const std::byte*>(expected.data());
  const bool same = onHost(x, checked * 4) == std::vector<std::byte>(bytes, bytes + checked * 4);
  const char* name = noise == Noise::gaussian ? "gaussian" : "rademacher";
  rows.push_back({std::string(name) + ", seeds " + std::to_string(terms), "float32", "add",
                  measure(count * 8, options.repetitions, from, to, add), bound, same});
}

// topk, axis=channel and bucket=tensor, of fp32 elements. Their encodes read the elements more than once, and topk's
// values go through its workspace, there and back: a row's bytes are what its kernels read and write. No bound stands
// for histograms, nor for the few chains that a tensor's sum has when it is one bucket.
void measureUncut(std::vector<Row>& rows, const std::string& text, const Options& options) {
  const auto codec = makeCodec(CodecSpec::parse(text));
  const CodecSpec& spec = codec->spec();
  const size_t count = (options.mib << 20) / 4, raw = count * 4, sent = codec->encodedBytes(count, DType::float32);
  const cuda::GridRun run{spec, DType::float32, count};
  const bool topk = spec.id == CodecId::topk, sums = spec.range == Range::l2 || spec.id == CodecId::sign1;
  const size_t reads = topk ? 5 : sums ? 3 : 2, selected = topk ? topkParts(spec, count).k * 8 : 0;
  const Memory x(raw), acc(raw), payload(sent), refused(4), from(raw * 3), to(raw * 3);
  const Memory workspace(topk ? cuda::topkWorkspaceBytes(run) : cuda::uncutWorkspaceBytes(run));
  auto* flag = static_cast<uint32_t*>(refused.get());
  auto* sum = static_cast<float*>(acc.get());
  const std::vector<std::byte> source = elements(count, DType::float32);
  must(cudaMemcpy(x.get(), source.data(), raw, cudaMemcpyDefault));
  std::vector<std::byte> expected(sent), values(raw);
  codec->encode(expected, source.data(), DType::float32, 0, count, {1, 2, 3});
  codec->decode(values.data(), DType::float32, expected, 0, count);
  const auto measureRow = [&](const char* loop, size_t bytes, double bound, const Memory& result,
                              const std::vector<std::byte>& same, const std::function<void()>& enqueue) {
    enqueue();  // once for what comes of it, decode-add into zeros
    const bool equal = onHost(result, same.size()) == same && onHost(refused, 4) == std::vector<std::byte>(4);
    rows.push_back({text, "float32", loop, measure(bytes, options.repetitions, from, to, enqueue), bound, equal});
  };

  const bool stochastic = !topk && gridFamily(spec.id)->rounding == Rounding::stochastic;
  const double bound = topk ? 0 : 80;
  measureRow("encode", raw * reads + sent + selected,
             sums && spec.axis == Axis::flat ? 0
             : stochastic                    ? 70
                                             : bound,
             payload, expected, [&] {
               const PhiloxKey key{1, 2, 3};
               topk ? cuda::encodeTopk({}, run, payload.get(), x.get(), key, workspace.get(), flag)
                    : cuda::encodeUncut({}, run, payload.get(), x.get(), key, workspace.get(), flag);
             });
  // What is added to 0 is what is decoded, but for the sign of a zero, which these elements do not come to.
  measureRow("decode-add", (topk ? 2 * selected : 2 * raw) + sent, bound, acc, values, [&] {
    topk ? cuda::decodeAddTopk({}, run, sum, payload.get(), workspace.get(), flag)
         : cuda::decodeAddUncut({}, run, sum, payload.get(), workspace.get(), flag);
  });
  measureRow("decode", raw + sent + selected, bound, x, values, [&] {
    topk ? cuda::decodeTopk({}, run, x.get(), payload.get(), workspace.get(), flag)
         : cuda::decodeUncut({}, run, x.get(), payload.get(), workspace.get(), flag);
  });
}

void print(const Row& row) {
  std::printf("%-32s %-9s %-11s %9.0f %7.1f %7.1f %7.1f %6.0f  %-5s %s\n", row.codec.c_str(), row.dtype.c_str(),
              row.loop.c_str(), row.measured.gigabytes_a_second, row.measured.least, row.measured.median,
              row.measured.most, row.bound, row.same ? "same" : "OTHER", row.pass() ? "PASS" : "FAIL");
}

void writeJson(const std::string& path, const std::vector<Row>& rows, const std::string& device,
               const Options& options) {
  std::ofstream out(path);
  out << "{\"device\": \"" << device << "\", \"cuda_runtime\": " << CUDART_VERSION << ", \"mib\": " << options.mib
      << ", \"repetitions\": " << options.repetitions << ", \"rows\": [";
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    out << (i ? ",\n" : "\n") << "  {\"codec\": \"" << row.codec << "\", \"dtype\": \"" << row.dtype
        << "\", \"loop\": \"" << row.loop << "\", \"gb_a_second\": " << row.measured.gigabytes_a_second
        << ", \"percent_of_copy\": " << row.measured.median << ", \"least\": " << row.measured.least
        << ", \"most\": " << row.measured.most << ", \"bound\": " << row.bound
        << ", \"same_as_host\": " << (row.same ? "true" : "false") << ", \"pass\": " << (row.pass() ? "true" : "false")
        << "}";
  }
  out << "\n]}\n";
  out.close();
  if (!out) throw std::runtime_error(path + ": expected a file that can be written, got an error");
}

int run(const Options& options) {
  if (cuda::deviceCount() == 0) {
    std::printf("cuda_perf: nothing was measured, for this machine has no GPU that CUDA can use.\n");
    return 0;
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0));
  std::printf("cuda_perf on %s, CUDA runtime %d, %zu MiB as fp32, %d repetitions\n", device.name, CUDART_VERSION,
              options.mib, options.repetitions);
  std::printf("%-32s %-9s %-11s %9s %7s %7s %7s %6s\n", "codec", "elements", "loop", "GB/s", "least", "% copy", "most",
              "bound");
  std::vector<std::string> texts;
  for (const char* bits : {"2", "4", "8"}) {
    for (const char* bucket : {"128", "512", "1024"}) {
      for (const char* name : {"minmax", "qsgd"})
        texts.push_back(std::string(name) + bits + ":bucket=" + bucket);
    }
  }
  for (const char* text :
       {"minmax3:bucket=1024", "minmax4:bucket=65536", "minmax4:bucket=128,meta=bf16", "dither4:bucket=1024",
        "lattice4:bucket=1024", "sym4:bucket=1024", "mid4:bucket=1024", "sym4:bucket=1024,range=l2",
        "sym4:bucket=65536,range=l2", "sign1:bucket=1024", "tern:bucket=128"})
    texts.push_back(text);
  for (const char* text : {"levels4:bucket=1024", "levels8:bucket=1024", "minmax4:bucket=512,rotate=1",
                           "minmax4:bucket=1024,rotate=1", "minmax4:bucket=65536,rotate=1",
                           "qsgd4:bucket=1024,rotate=1", "gauss2", "gauss4", "gauss8", "gauss4:bucket=65536"})
    texts.push_back(text);
  std::vector<Row> rows;
  const auto measureRows = [&](const std::string& text, DType dtype) {
    if (text.find(options.only) == std::string::npos) return;
    const size_t before = rows.size();
    measureCodec(rows, text, dtype, options);
    std::for_each(rows.begin() + static_cast<ptrdiff_t>(before), rows.end(), print);
  };
  const auto measureFusedRows = [&](const std::string& text) {
    if (text.find(options.only) == std::string::npos) return;
    const size_t before = rows.size();
    measureFused(rows, text, options);
    std::for_each(rows.begin() + static_cast<ptrdiff_t>(before), rows.end(), print);
  };
  const auto measureSeeds = [&](Noise noise, size_t terms, double bound) {
    const std::string name = noise == Noise::gaussian ? "gaussian" : "rademacher";
    if (name.find(options.only) == std::string::npos) return;
    measureNoise(rows, noise, terms, bound, options);
    print(rows.back());
  };
  for (const std::string& text : texts)
    measureRows(text, DType::float32);
  for (DType dtype : {DType::bfloat16, DType::float16}) {
    for (const char* text : {"minmax4:bucket=1024", "qsgd4:bucket=1024", "gauss4"})
      measureRows(text, dtype);
  }
  for (const char* text : {"fp16", "bf16", "bf16:round=stochastic", "fp8e4m3", "logbyte", "log9"})
    measureRows(text, DType::float32);
  measureRows("fp8e4m3", DType::bfloat16);
  for (const char* text : {"minmax4:bucket=512", "qsgd4:bucket=1024", "sym4:bucket=1024", "sym4:bucket=4096"})
    measureFusedRows(text);
  for (size_t terms : {1, 4, 16})
    measureSeeds(Noise::rademacher, terms, 80);
  for (size_t terms : {1, 16})
    measureSeeds(Noise::gaussian, terms, 0);  // arithmetic alone takes longer than the copy
  for (const char* text : {"minmax4:axis=channel,C=4096", "qsgd4:axis=channel,C=4096", "sym4:axis=channel,C=64",
                           "sym4:axis=channel,C=4096,range=l2", "minmax4:bucket=tensor", "sym4:bucket=tensor,range=l2",
                           "topk:keep=0.2", "topk:keep=0.01"}) {
    if (std::string(text).find(options.only) == std::string::npos) continue;
    const size_t before = rows.size();
    measureUncut(rows, text, options);
    std::for_each(rows.begin() + static_cast<ptrdiff_t>(before), rows.end(), print);
  }
  if (!options.json.empty()) writeJson(options.json, rows, device.name, options);
  const bool pass = std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.pass(); });
  std::printf("%s\n", pass ? "PASS" : "FAIL");
  return pass ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--mib" && std::atoi(value.c_str()) > 0) {
      options.mib = static_cast<size_t>(std::atoi(value.c_str()));
    } else if (name == "--repetitions" && std::atoi(value.c_str()) > 0) {
      options.repetitions = std::atoi(value.c_str());
    } else if (name == "--only" && !value.empty()) {
      options.only = value;
    } else if (name == "--json" && !value.empty()) {
      options.json = value;
    } else {
      std::fprintf(stderr,
                   "usage: cuda_perf [--mib 256] [--repetitions 21] [--only <part of a codec>] [--json <file>]\n");
      return 2;
    }
  }
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_perf: %s\n", error.what());
    return 2;
  }
}

// Speed of the codecs on one core, each row beside the bound that memory sets it. Definitions: README.md, "codec_perf".
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "codec/grid.h"
#include "codec/level_table.h"
#include "kernels/half.h"
#include "kernels/table.h"
#include "streams.h"

using namespace lowcomm;

namespace {

struct Options {
  size_t mib = 256;
  int repetitions = 9;
  std::string form, only, json;
};

enum class Loop { encode, decode, add };
constexpr const char* kLoopNames[] = {"encode", "decode", "decode-add"};

struct Row {
  const KernelTable* form;
  Loop loop;
  std::string codec;
  int bits;
  uint32_t bucket;
  DType dtype = DType::float32;
  bool in_cache = false;
  std::string options = "";  // beside the bucket, as in a codec's text

  // Measured.
  double seconds = INFINITY;        // of one pass over `elements`
  double bound_seconds = INFINITY;  // that memory alone would take; not set for rows in cache
  size_t elements = 0;
  double error = 0;  // relative, L2

  double rate() const { return static_cast<double>(elements) * 4 / seconds * 1e-9; }
  double percent() const { return 100 * bound_seconds / seconds; }
  std::string spec() const { return codec + std::to_string(bits) + ":bucket=" + std::to_string(bucket) + options; }
  bool rotated() const { return isRotated(CodecSpec::parse(spec())); }
};

struct Gate {
  std::string name;
  double value, bound;
  bool pass() const { return value >= bound; }
};

constexpr size_t kPiece = size_t{1} << 22;     // elements of one timed call: 16 MiB of fp32
constexpr size_t kResident = size_t{1} << 15;  // 128 KiB of fp32 and its codes: within a second-level cache
constexpr int kResidentCalls = 64;

volatile uint32_t sink;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class T>
std::unique_ptr<T[], decltype(&std::free)> allocate(size_t count) {
  void* p = std::aligned_alloc(4096, (count * sizeof(T) + 4095) / 4096 * 4096);
  if (!p) throw std::bad_alloc();
  std::memset(p, 0, count * sizeof(T));  // no page faults while the clock runs
  return {static_cast<T*>(p), &std::free};
}

// The smallest time of every piece over all passes: a shared machine interrupts a long pass nearly always, a piece
// seldom.
class Fastest {
 public:
  explicit Fastest(size_t pieces) : best_(pieces, INFINITY) {}

  template <class F>
  void pass(F&& piece) {
    for (size_t i = 0; i < best_.size(); ++i) {
      const double start = now();
      piece(i);
      best_[i] = std::min(best_[i], now() - start);
    }
  }

  double seconds() const {
    double sum = 0;
    for (double s : best_)
      sum += s;
    return sum;
  }

 private:
  std::vector<double> best_;
};

// Levels as a gradient's are learned: closer where values are frequent, in the middle.
LevelTable learned(int bits) {
  std::vector<float> values(size_t{1} << bits);
  const auto top = static_cast<double>(values.size() - 1);
  for (size_t i = 0; i < values.size(); ++i) {
    const double t = 2 * static_cast<double>(i) / top - 1;
    values[i] = static_cast<float>(0.5 + 0.25 * (t + t * t * t));
  }
  return LevelTable(values);
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : repetitions_(options.repetitions),
        pieces_(std::max<size_t>(1, (options.mib << 18) / kPiece)),
        x_(allocate<float>(count())),
        y_(allocate<float>(count())),
        half_(allocate<uint16_t>(count())),
        payload_(allocate<std::byte>(2 * count())) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    const size_t fresh = std::min(count(), size_t{1} << 20);
    for (size_t i = 0; i < fresh; ++i)
      x_[i] = normal(generator);
    for (size_t i = fresh; i < count(); ++i)
      x_[i] = x_[i - fresh];
  }

  size_t count() const { return pieces_ * kPiece; }

  void measure(Row& row) {
    const CodecSpec spec = CodecSpec::parse(row.spec());
    const GridCodec codec =
        needsTable(spec) ? GridCodec(spec, *row.form, learned(row.bits)) : GridCodec(spec, *row.form);
    const size_t piece = row.in_cache ? kResident : kPiece;
    const size_t bytes = codec.encodedBytes(piece, row.dtype);
    narrow(row.dtype);
    const auto encode = [&](size_t i) {
      codec.encode({payload_.get() + i * bytes, bytes}, source(row.dtype, i * piece), row.dtype, i * piece, piece,
                   {1, 2, static_cast<uint32_t>(i)});
    };
    const auto decode = [&](size_t i) {
      std::memset(y_.get() + i * piece, 0, row.loop == Loop::add ? piece * 4 : 0);
      codec.decode(target(row.dtype, i * piece), row.dtype, {payload_.get() + i * bytes, bytes}, i * piece, piece);
    };
    const auto add = [&](size_t i) {
      codec.decodeAdd(y_.get() + i * piece, row.dtype, {payload_.get() + i * bytes, bytes}, i * piece, piece);
    };

    const size_t pieces = row.in_cache ? 1 : pieces_;
    for (size_t i = 0; i < pieces; ++i) {
      encode(i);
      decode(i);
    }
    row.error = error(row.dtype, piece);
    row.elements = pieces * piece;
    const auto loop = row.loop == Loop::encode   ? std::function<void(size_t)>(encode)
                      : row.loop == Loop::decode ? std::function<void(size_t)>(decode)
                                                 : std::function<void(size_t)>(add);
    if (row.loop == Loop::add) std::memset(y_.get(), 0, count() * 4);
    if (row.in_cache) {
      Fastest own(1);
      for (int r = 0; r < repetitions_ * 9; ++r)
        own.pass([&](size_t) {
          for (int call = 0; call < kResidentCalls; ++call)
            loop(0);
        });
      row.seconds = own.seconds() / kResidentCalls;
      return;
    }
    Fastest own(pieces), bound(pieces);
    for (int r = 0; r < repetitions_; ++r) {
      bound.pass([&](size_t i) {
        if (row.loop == Loop::encode) {
          sink = streams::read(x_.get() + i * kPiece, kPiece);
        } else {
          streams::addInPlace(y_.get() + i * kPiece, kPiece, 1e-9f);
        }
      });
      own.pass(loop);
    }
    row.seconds = own.seconds();
    // An element of an encode moves its own bytes and its code's twice: a line is read before it is written. One of a
    // decode moves its own twice, as the addition does.
    const double item = row.dtype == DType::float32 ? 4 : 2;
    row.bound_seconds = bound.seconds() * (row.loop == Loop::encode ? item + row.bits / 4.0 : item) / 4;
  }

 private:
  void narrow(DType dtype) {
    if (dtype == DType::float32 || dtype == narrowed_) return;
    narrowed_ = dtype;
    for (size_t i = 0; i < count(); ++i)
      half_[i] = dtype == DType::float16 ? floatToFloat16(x_[i]) : floatToBfloat16(x_[i]);
  }

  const void* source(DType dtype, size_t at) const {
    return dtype == DType::float32 ? static_cast<const void*>(x_.get() + at) : half_.get() + at;
  }

  // 16-bit values are decoded into y's memory: half_ keeps the source.
  void* target(DType dtype, size_t at) const {
    return dtype == DType::float32 ? static_cast<void*>(y_.get() + at) : reinterpret_cast<uint16_t*>(y_.get()) + at;
  }

  double error(DType dtype, size_t piece) const {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < piece; ++i) {
      uint16_t bits;
      std::memcpy(&bits, static_cast<const char*>(target(dtype, i)), 2);
      const double y = dtype == DType::float32   ? y_[i]
                       : dtype == DType::float16 ? float16ToFloat(bits)
                                                 : bfloat16ToFloat(bits);
      difference += (y - x_[i]) * (y - x_[i]);
      norm += double{x_[i]} * x_[i];
    }
    return std::sqrt(difference / norm);
  }

  int repetitions_;
  size_t pieces_;
  std::unique_ptr<float[], decltype(&std::free)> x_, y_;
  std::unique_ptr<uint16_t[], decltype(&std::free)> half_;
  std::unique_ptr<std::byte[], decltype(&std::free)> payload_;
  DType narrowed_ = DType::float32;
};

std::vector<Row> rowsOf(const KernelTable* form) {
  std::vector<Row> rows;
  for (int bits = 1; bits <= 8; ++bits)
    rows.push_back({form, Loop::encode, "minmax", bits, 512});
  for (uint32_t bucket : {128, 1024}) {
    for (int bits : {2, 4, 8})
      rows.push_back({form, Loop::encode, "minmax", bits, bucket});
  }
  for (int bits : {4, 8})
    rows.push_back({form, Loop::encode, "qsgd", bits, 1024});
  for (Loop loop : {Loop::decode, Loop::add}) {
    for (int bits : {2, 4, 8})
      rows.push_back({form, loop, "minmax", bits, 512});
  }
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    for (Loop loop : {Loop::encode, Loop::decode})
      rows.push_back({form, loop, "minmax", 4, 512, dtype});
  }
  for (int bits : {2, 4, 8}) {
    for (const char* codec : {"gauss", "levels"}) {
      for (Loop loop : {Loop::encode, Loop::decode, Loop::add})
        rows.push_back({form, loop, codec, bits, 512});
    }
    for (Loop loop : {Loop::encode, Loop::decode, Loop::add})
      rows.push_back({form, loop, "minmax", bits, 512, DType::float32, false, ",rotate=1"});
  }
  for (const char* codec : {"qsgd", "sym"})
    rows.push_back({form, Loop::encode, codec, 4, 512, DType::float32, false, ",meta=bf16,rotate=1"});
  rows.push_back({form, Loop::encode, "minmax", 4, 512, DType::float32, true});
  return rows;
}

const Row* find(const std::vector<Row>& rows, const Row& like, int bits) {
  for (const Row& r : rows) {
    if (r.form == like.form && r.loop == like.loop && r.codec == like.codec && r.bits == bits &&
        r.bucket == like.bucket && r.dtype == like.dtype && r.options == like.options && !r.in_cache)
      return &r;
  }
  return nullptr;
}

// The targets of one instruction set, as fractions of the bound.
struct Targets {
  const char* form;
  double nearest, nearest_small, stochastic, rotated, odd_bits, decode, add, in_cache;
};
constexpr Targets kTargets[] = {{"avx2", .85, .78, .52, .40, .85, .65, .72, 1.7},
                                {"avx512", .90, .82, .66, .50, .85, .70, .83, 2}};

std::vector<Gate> judge(const std::vector<Row>& rows) {
  std::vector<Gate> gates;
  for (const Row& row : rows) {
    const auto* t = std::find_if(std::begin(kTargets), std::end(kTargets),
                                 [&](const Targets& target) { return !std::strcmp(target.form, row.form->name); });
    if (t == std::end(kTargets) || row.dtype != DType::float32) continue;
    // No target: what undoes a rotation, and levels, which none but their user knows.
    if (row.codec == "levels" || (row.rotated() && row.loop != Loop::encode)) continue;
    const std::string name =
        std::string(row.form->name) + " " + kLoopNames[static_cast<int>(row.loop)] + " " + row.spec();
    const double fraction = row.percent() / 100;
    if (row.in_cache) {
      if (const Row* memory = find(rows, row, row.bits))
        gates.push_back({name + " in L2, times its DRAM speed", row.rate() / memory->rate(), t->in_cache});
    } else if (row.loop != Loop::encode) {
      gates.push_back({name + ", of in-place add", fraction, row.loop == Loop::add ? t->add : t->decode});
    } else if (row.rotated()) {
      gates.push_back({name + ", of its bound", fraction, t->rotated});
    } else if (row.codec == "qsgd") {
      gates.push_back({name + ", of its bound", fraction, t->stochastic});
    } else if (row.bits == 2 || row.bits == 4 || row.bits == 8) {
      gates.push_back({name + ", of its bound", fraction, row.bucket >= 512 ? t->nearest : t->nearest_small});
    } else if (row.bits % 2 == 1 && row.bits > 1) {
      const Row *below = find(rows, row, row.bits - 1), *above = find(rows, row, row.bits + 1);
      if (below && above)
        gates.push_back(
            {name + ", of its neighbours' mean", 2 * row.rate() / (below->rate() + above->rate()), t->odd_bits});
    }
  }
  return gates;
}

std::string cpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void writeJson(const Options& options, const std::vector<Row>& rows, const std::vector<Gate>& gates) {
  std::ofstream out(options.json);
  out << "{\n  \"machine\": {\"cpu\": \"" << cpuName() << "\", \"compiler\": \"" << __VERSION__ << "\"},\n"
      << "  \"configuration\": {\"mib\": " << options.mib << ", \"repetitions\": " << options.repetitions << "},\n"
      << "  \"rows\": [";
  const char* comma = "\n";
  for (const Row& r : rows) {
    out << comma << "    {\"form\": \"" << r.form->name << "\", \"loop\": \"" << kLoopNames[static_cast<int>(r.loop)]
        << "\", \"codec\": \"" << r.codec << "\", \"bits\": " << r.bits << ", \"bucket\": " << r.bucket
        << ", \"options\": \"" << r.options << "\""
        << ", \"dtype\": \"" << dtypeName(r.dtype) << "\", \"in_cache\": " << (r.in_cache ? "true" : "false")
        << ", \"gb_per_s\": " << r.rate() << ", \"percent_of_bound\": ";
    if (r.in_cache) {
      out << "null";
    } else {
      out << r.percent();
    }
    out << ", \"relative_error\": " << r.error << "}";
    comma = ",\n";
  }
  out << "\n  ],\n  \"gates\": [";
  comma = "\n";
  for (const Gate& g : gates) {
    out << comma << "    {\"name\": \"" << g.name << "\", \"value\": " << g.value
        << ", \"op\": \">=\", \"bound\": " << g.bound << ", \"pass\": " << (g.pass() ? "true" : "false") << "}";
    comma = ",\n";
  }
  out << "\n  ]\n}\n";
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    const bool known =
        key == "--mib" || key == "--repetitions" || key == "--form" || key == "--only" || key == "--json";
    if (!known || i + 1 == argc) {
      std::fprintf(stderr, "codec_perf [--mib N] [--repetitions N] [--form NAME|all] [--only TEXT] [--json FILE]\n");
      std::exit(2);
    }
    const char* value = argv[++i];
    if (key == "--mib") options.mib = std::strtoul(value, nullptr, 10);
    if (key == "--repetitions") options.repetitions = std::atoi(value);
    if (key == "--form") options.form = value;
    if (key == "--only") options.only = value;
    if (key == "--json") options.json = value;
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  size_t count = 0;
  const KernelTable* const* forms = kernelForms(&count);
  std::vector<Row> rows;
  for (size_t f = 0; f < count; ++f) {
    // All but the reference, which nobody waits for unless it is asked for.
    const bool wanted = options.form.empty() ? f > 0 : options.form == "all" || options.form == forms[f]->name;
    for (Row& row : wanted ? rowsOf(forms[f]) : std::vector<Row>()) {
      const std::string name = std::string(kLoopNames[static_cast<int>(row.loop)]) + " " + row.spec();
      if (name.find(options.only) != std::string::npos) rows.push_back(row);
    }
  }

  std::printf("# codec_perf\n# cpu=%s  compiler=%s\n# mib=%zu  repetitions=%d  threads=1\n", cpuName().c_str(),
              __VERSION__, options.mib, options.repetitions);
  std::printf("# %-6s %-10s %-6s %4s %6s %-8s %-6s %10s %8s %10s\n", "form", "loop", "codec", "bits", "bucket", "dtype",
              "memory", "GB/s fp32", "% bound", "error");
  Bench bench(options);
  for (Row& row : rows) {
    bench.measure(row);
    char percent[16] = "-";
    if (!row.in_cache) std::snprintf(percent, sizeof(percent), "%.1f", row.percent());
    std::printf("  %-6s %-10s %-6s %4d %6u %-8s %-6s %10.2f %8s %10.2e %s\n", row.form->name,
                kLoopNames[static_cast<int>(row.loop)], row.codec.c_str(), row.bits, row.bucket, dtypeName(row.dtype),
                row.in_cache ? "L2" : "DRAM", row.rate(), percent, row.error, row.options.c_str());
    std::fflush(stdout);
  }

  const std::vector<Gate> gates = judge(rows);
  bool all = true;
  for (const Gate& gate : gates) {
    std::printf("%s  %-72s %10.4f >= %.4f\n", gate.pass() ? "PASS" : "FAIL", gate.name.c_str(), gate.value, gate.bound);
    all &= gate.pass();
  }
  for (const Targets& targets : kTargets) {
    bool have = false;
    for (size_t f = 0; f < count; ++f)
      have |= !std::strcmp(forms[f]->name, targets.form);
    if (!have)
      std::printf("%s rows cannot be judged: this build or this machine has no such instructions\n", targets.form);
  }
  if (!options.json.empty()) writeJson(options, rows, gates);
  return all ? 0 : 1;
}

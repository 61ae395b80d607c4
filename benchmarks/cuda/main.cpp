// Speed of the CUDA kernels on one device, compared with a copy of as many bytes.
// Definitions: benchmarks/results/cuda_perf.md.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "rows.h"

using namespace lowcomm;

namespace {

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
  for (const char* text : {"minmax3:bucket=1024", "minmax4:bucket=65536", "minmax4:bucket=128,meta=bf16",
                           "lattice4:bucket=1024", "sym4:bucket=1024", "mid4:bucket=1024", "sym4:bucket=1024,range=l2",
                           "sym4:bucket=65536,range=l2", "sign1:bucket=1024"})
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
  for (size_t terms : {1, 4, 16})
    measureSeeds(Noise::rademacher, terms, 80);
  for (size_t terms : {1, 16})
    measureSeeds(Noise::gaussian, terms, 0);  // arithmetic alone takes longer than the copy
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

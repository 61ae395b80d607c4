// Speed of the codecs and of what is fused with them on one core, each row next to the bound that memory sets it.
// Definitions: benchmarks/results/codec_perf.md.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "codecs.h"
#include "operations.h"

using namespace lowcomm;

namespace {

std::string cpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void writeJson(const Options& options, const std::vector<Row>& rows, const std::vector<Operation>& operations,
               const std::vector<Gate>& gates) {
  std::ofstream out(options.json);
  out << "{\n  \"machine\": {\"cpu\": \"" << cpuName() << "\", \"compiler\": \"" << __VERSION__ << "\"},\n"
      << "  \"configuration\": {\"mib\": " << options.mib << ", \"repetitions\": " << options.repetitions << "},\n"
      << "  \"rows\": [";
  const char* comma = "\n";
  for (const Row& r : rows) {
    out << comma << "    {\"form\": \"" << r.form->name << "\", \"loop\": \"" << kLoopNames[static_cast<int>(r.loop)]
        << "\", \"codec\": \"" << r.text << "\", \"bits_an_element\": " << r.bits << ", \"dtype\": \""
        << dtypeName(r.dtype) << "\", \"gb_per_s\": " << r.rate() << ", \"percent_of_bound\": " << r.percent();
    out << ", \"relative_error\": " << r.error << "}";
    comma = ",\n";
  }
  out << "\n  ],\n  \"operations\": [";
  comma = "\n";
  for (const Operation& o : operations) {
    out << comma << "    {\"form\": \"" << o.form << "\", \"operation\": \"" << o.name << "\", \"gb_per_s\": " << o.rate
        << ", \"compared_with\": \"" << o.against << "\", \"ratio\": " << o.ratio << "}";
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
  std::vector<const KernelTable*> wanted;
  for (size_t f = 0; f < count; ++f) {
    // All but the reference, which nobody waits for unless it is asked for.
    if (options.form.empty() ? f == 0 : options.form != "all" && options.form != forms[f]->name) continue;
    wanted.push_back(forms[f]);
    for (Row& row : rowsOf(forms[f])) {
      if (row.name().find(options.only) != std::string::npos) rows.push_back(row);
    }
  }

  std::printf("# codec_perf\n# cpu=%s  compiler=%s\n# mib=%zu  repetitions=%d  threads=1\n", cpuName().c_str(),
              __VERSION__, options.mib, options.repetitions);
  std::printf("# %-6s %-10s %-34s %-8s %5s %10s %8s %10s\n", "form", "loop", "codec", "dtype", "bits", "GB/s fp32",
              "% bound", "error");
  measureRows(options, rows, [](const Row& row) {
    std::printf("  %-6s %-10s %-34s %-8s %5.2f %10.2f %8.1f %10.2e\n", row.form->name,
                kLoopNames[static_cast<int>(row.loop)], row.text.c_str(), dtypeName(row.dtype), row.bits, row.rate(),
                row.percent(), row.error);
    std::fflush(stdout);
  });

  std::printf("# %-6s %-34s %10s %8s  of\n", "form", "operation", "GB/s fp32", "ratio");
  const std::vector<Operation> operations = measureOperations(options, wanted, [](const Operation& o) {
    std::printf("  %-6s %-34s %10.2f %8.2f  %s\n", o.form.c_str(), o.name.c_str(), o.rate, o.ratio, o.against.c_str());
    std::fflush(stdout);
  });

  std::vector<Gate> gates = judge(rows);
  for (const Operation& o : operations) {
    if (o.target > 0) gates.push_back({o.form + " " + o.name + ", " + o.against, o.ratio, o.target});
  }
  bool all = true;
  for (const Gate& gate : gates) {
    std::printf("%s  %-72s %10.4f >= %.4f\n", gate.pass() ? "PASS" : "FAIL", gate.name.c_str(), gate.value, gate.bound);
    all &= gate.pass();
  }
  for (const char* name : {"avx2", "avx512"}) {
    if (!findKernels(name))
      std::printf("%s rows cannot be judged: this build or this machine has no such instructions\n", name);
  }
  if (!options.json.empty()) writeJson(options, rows, operations, gates);
  return all ? 0 : 1;
}

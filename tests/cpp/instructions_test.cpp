// Instructions an element of the AVX2 kernels, counted by callgrind: a machine without noise, where times have it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

struct Budget {
  const char* loop;
  const char* codec;
  double instructions;  // an element, with GCC 12
};

// The cost of the format's work when nothing is spilled or done twice. Encodes include the check for NaN and infinity.
constexpr Budget kBudgets[] = {
    {"encode", "minmax4:bucket=512", 1.9},     {"encode", "minmax4:bucket=128", 2.2},
    {"encode", "qsgd4:bucket=512", 4.1},       {"decode", "minmax4:bucket=512", 0.9},
    {"decode-add", "minmax4:bucket=512", 1.0},
};

double allowance() {
#if defined(__clang__) || !defined(__GNUC__) || __GNUC__ != 12
  return 1.05;
#else
  return 1;
#endif
}

uint64_t totalOf(const std::filesystem::path& path) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("totals: ")) return std::strtoull(line.c_str() + 8, nullptr, 10);
  }
  return 0;
}

TEST(Instructions, AnElementOfTheAvx2Kernels) {
  if (!findKernels("avx2")) GTEST_SKIP() << "this build or this machine has no AVX2";
  if (LOWCOMM_UNOPTIMISED) GTEST_SKIP() << "counted in optimised builds without sanitizers only";
  if (std::system("valgrind --version >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "valgrind is missing: install the system package (Debian: valgrind)";
  }
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / ("lowcomm_instructions_" + std::to_string(getpid()));
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string out = (folder / "count").string();
  std::string command =
      "valgrind --tool=callgrind --toggle-collect=lowcomm_counted --dump-after=lowcomm_counted "
      "--callgrind-out-file='" +
      out + "' '" LOWCOMM_COUNTED_BINARY "'";
  for (const Budget& budget : kBudgets)
    command += std::string(" '") + budget.loop + " " + budget.codec + " avx2'";
  ASSERT_EQ(std::system((command + " >'" + out + ".log' 2>&1").c_str()), 0) << command;

  int part = 0;
  for (const Budget& budget : kBudgets) {
    const uint64_t total = totalOf(out + "." + std::to_string(++part));
    ASSERT_GT(total, 0u) << "no count in part " << part << " of " << out;
    const double each = static_cast<double>(total) / LOWCOMM_COUNTED_ELEMENTS;
    RecordProperty(std::string(budget.loop) + " " + budget.codec, std::to_string(each));
    EXPECT_LE(each, budget.instructions * allowance()) << budget.loop << " " << budget.codec;
    EXPECT_GE(each, 0.3) << budget.loop << " " << budget.codec << ": too few to be the loop";
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace lowcomm

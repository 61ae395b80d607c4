// A folder is a layer, and includes point down only.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace lowcomm {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kLayers = {"base",       "kernels",  "codec",  "wire",     "transport",
                                          "collective", "messages", "engine", "pipeline", "cuda"};

struct Include {
  std::string file, path;
};

std::vector<Include> includesOf(const std::string& layer) {
  std::vector<Include> found;
  const fs::path folder = fs::path(LOWCOMM_SOURCE_DIR) / "csrc" / layer;
  if (!fs::exists(folder)) return found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string extension = entry.path().extension();
    if (extension != ".h" && extension != ".cpp" && extension != ".inl" && extension != ".cu" && extension != ".cuh") {
      continue;
    }
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line);) {
      const size_t at = line.find("#include");
      if (at == std::string::npos) continue;
      const size_t open = line.find_first_of("\"<", at);
      const size_t close = open == std::string::npos ? open : line.find_first_of("\">", open + 1);
      if (close == std::string::npos) continue;
      found.push_back({entry.path().string(), line.substr(open + 1, close - open - 1)});
    }
  }
  return found;
}

TEST(Layers, NoTorchBelowTheBackend) {
  for (const std::string& layer : kLayers) {
    for (const Include& include : includesOf(layer)) {
      for (const char* prefix : {"torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h"}) {
        EXPECT_FALSE(include.path.starts_with(prefix)) << include.file << " includes " << include.path;
      }
    }
  }
}

TEST(Layers, IncludesPointDown) {
  EXPECT_FALSE(includesOf("codec").empty());
  EXPECT_FALSE(includesOf("cuda").empty());
  for (size_t i = 0; i < kLayers.size(); ++i) {
    for (const Include& include : includesOf(kLayers[i])) {
      const std::string first = include.path.substr(0, include.path.find('/'));
      for (const char* above : {"backend", "bindings", "diloco", "adam", "seed_replay", "subspace", "tensor"}) {
        EXPECT_NE(first, above) << include.file << " includes " << include.path;
      }
      for (size_t j = i + 1; j < kLayers.size(); ++j) {
        EXPECT_NE(first, kLayers[j]) << include.file << " includes " << include.path;
      }
    }
  }
}

// A function of a header that a vector unit calls would be compiled for its instruction set, and the linker might keep
// that copy for all. The headers that are included here declare types and constants.
TEST(Layers, VectorLoopsIncludeKernelsAndIntrinsicsOnly) {
  size_t checked = 0;
  for (const Include& include : includesOf("kernels")) {
    if (!include.file.ends_with(".inl")) continue;
    ++checked;
    bool fine = include.path.starts_with("kernels/");
    for (const char* header : {"cstddef", "cstdint", "immintrin.h", "arm_neon.h"})
      fine |= include.path == header;
    EXPECT_TRUE(fine) << include.file << " includes " << include.path;
  }
  EXPECT_GT(checked, 20u);
}

// One template makes the units of all instruction sets: none is written by hand next to it.
TEST(Layers, VectorUnitsComeFromTheTemplate) {
  const fs::path folder = fs::path(LOWCOMM_SOURCE_DIR) / "csrc" / "kernels";
  EXPECT_TRUE(fs::exists(folder / "isa" / "form.cpp.in"));
  size_t loops = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    loops += name.ends_with("_vector.inl") && name != "philox_vector.inl";
    for (const char* form : {"_avx2.cpp", "_avx512.cpp", "_neon.cpp"})
      EXPECT_FALSE(name.ends_with(form)) << entry.path();
  }
  EXPECT_EQ(loops, 6u);
}

// Above the engine: what ops borrow knows neither ops nor optimizers, and these know each other only through the
// engine.
TEST(Layers, StateBackendAndOptimizersAreApart) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> apart = {
      {"tensor", {"backend", "diloco", "adam", "seed_replay", "subspace", "bindings"}},
      {"backend", {"diloco", "adam", "seed_replay", "subspace", "bindings"}},
      {"subspace", {"backend", "diloco", "adam", "seed_replay", "bindings"}},
      {"diloco", {"backend", "adam", "seed_replay", "subspace", "bindings"}},
      {"adam", {"backend", "diloco", "seed_replay", "subspace", "bindings"}},
      {"seed_replay", {"backend", "diloco", "adam", "subspace", "bindings"}}};
  for (const auto& [layer, others] : apart) {
    EXPECT_FALSE(includesOf(layer).empty()) << layer;
    for (const Include& include : includesOf(layer)) {
      const std::string first = include.path.substr(0, include.path.find('/'));
      for (const std::string& other : others)
        EXPECT_NE(first, other) << include.file << " includes " << include.path;
    }
  }
}

}  // namespace
}  // namespace lowcomm

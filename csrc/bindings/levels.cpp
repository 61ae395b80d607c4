#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "codec/level_table.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

const float* floats(const at::Tensor& x, const char* name) {
  if (!x.device().is_cpu() || x.scalar_type() != at::kFloat || !x.is_contiguous()) {
    throw TypeError(std::string(name) + ": expected a contiguous float32 CPU tensor, got " +
                    c10::toString(x.scalar_type()) + " on " + x.device().str());
  }
  return x.const_data_ptr<float>();
}

LevelTable tableOf(const at::Tensor& values, uint32_t version) {
  const float* first = floats(values, "levels");
  return LevelTable({first, first + values.numel()}, version);
}

at::Tensor valuesOf(const LevelTable& table) {
  at::Tensor values = at::empty({static_cast<int64_t>(table.values().size())}, at::kFloat);
  std::copy(table.values().begin(), table.values().end(), values.mutable_data_ptr<float>());
  return values;
}

}  // namespace

void bindLevels(py::module_& m) {
  py::class_<LevelTable>(m, "LevelTable",
                         "The 2^b values of a ``levels<b>`` codec, in 0...1 and increasing, and their version.")
      .def(py::init([](const at::Tensor& values, uint32_t version) {
             return asPythonErrors([&] { return tableOf(values, version); });
           }),
           py::arg("values"), py::arg("version") = 0)
      .def_property_readonly("values", &valuesOf)
      .def_property_readonly("version", &LevelTable::version)
      .def("__repr__", [](const LevelTable& table) { return "LevelTable(" + table.str() + ")"; });
  py::class_<LevelLearning>(m, "LevelLearning", "QSDP's Algorithm 2: see csrc/codec/level_learning.h.")
      .def(py::init([](const LevelTable& start, uint32_t bucket) {
             return asPythonErrors([&] { return LevelLearning(start, bucket); });
           }),
           py::arg("start"), py::arg("bucket"))
      .def(
          "see",
          [](LevelLearning& self, const at::Tensor& x) {
            asPythonErrors([&] {
              const float* first = floats(x, "x");
              py::gil_scoped_release released;
              self.see(first, static_cast<uint64_t>(x.numel()));
            });
          },
          py::arg("x"))
      .def_property_readonly("seen", &LevelLearning::seen)
      .def("table", &LevelLearning::table, py::arg("version"));
  m.def(
      "even_levels", [](int bits) { return asPythonErrors([&] { return LevelTable::even(bits); }); }, py::arg("bits"));
  m.def(
      "mean_levels",
      [](const std::vector<LevelTable>& tables, const std::vector<uint64_t>& seen, const LevelTable& otherwise,
         uint32_t version) { return asPythonErrors([&] { return meanOf(tables, seen, otherwise, version); }); },
      py::arg("tables"), py::arg("seen"), py::arg("otherwise"), py::arg("version"));
}

}  // namespace lowcomm

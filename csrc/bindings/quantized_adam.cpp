#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "adam/quantized_adam.h"
#include "backend/backend_queue.h"
#include "bindings/bindings.h"
#include "bindings/option_reader.h"
#include "tensor/errors.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

std::vector<AdamParameter> parametersOf(const std::vector<std::tuple<std::string, at::Tensor, size_t>>& given) {
  std::vector<AdamParameter> parameters;
  for (const auto& [name, tensor, group] : given)
    parameters.push_back({name, tensor, group});
  return parameters;
}

}  // namespace

void bindQuantizedAdam(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<QuantizedAdam>(m, "QuantizedAdam")
      .def(py::init([](const c10::intrusive_ptr<LowcommBackend>& group, const std::string& codec, int64_t warmup_steps,
                       int64_t check_every, uint64_t seed) {
             return translated([&] {
               return std::make_unique<QuantizedAdam>(
                   std::make_shared<BackendQueue>(group),
                   QuantizedAdamOptions{CodecSpec::parse(codec), warmup_steps, check_every, seed});
             });
           }),
           py::arg("group"), py::kw_only(), py::arg("codec"), py::arg("warmup_steps"), py::arg("check_every"),
           py::arg("seed"))
      .def(
          "add",
          [](QuantizedAdam& q, const std::vector<std::tuple<std::string, at::Tensor, size_t>>& parameters) {
            translated([&] { q.add(parametersOf(parameters)); });
          },
          py::arg("parameters"))
      .def(
          "step",
          [](QuantizedAdam& q, const std::vector<std::optional<at::Tensor>>& gradients, const std::vector<Rule>& rules,
             float scale, bool skip, const QuantizedAdam::Settle& settle) {
            return translated([&] { return q.step(definedOf(gradients), rulesOf(rules), scale, skip, settle); });
          },
          py::arg("gradients"), py::arg("rules"), py::arg("scale"), py::arg("skip"), py::arg("settle") = nullptr,
          release())
      .def("state", [](const QuantizedAdam& q) { return translated([&] { return q.state(); }); })
      .def(
          "load",
          [](QuantizedAdam& q, const std::vector<QuantizedAdam::State>& state) { translated([&] { q.load(state); }); },
          py::arg("state"));
}

}  // namespace lowcomm

#include "adam/subspace_adam.h"

#include "bindings/bindings.h"
#include "bindings/option_reader.h"
#include "tensor/errors.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

using Tensors = std::vector<std::optional<at::Tensor>>;

SubspaceParameter parameterOf(const std::string& name, const at::Tensor& tensor, size_t group, const std::string& rule,
                              int64_t axis, const std::optional<at::Tensor>& vectors, int64_t width, bool is_slice,
                              bool is_coordinates) {
  const SubspaceRule known = rule == "rows"        ? SubspaceRule::rows
                             : rule == "projected" ? SubspaceRule::projected
                                                   : SubspaceRule::plain;
  return {name, tensor, group, known, axis, vectors.value_or(at::Tensor()), width, is_slice, is_coordinates};
}

}  // namespace

void bindSubspaceAdam(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<SubspaceAdam>(m, "SubspaceAdam")
      .def(py::init<>())
      .def(
          "add",
          [](SubspaceAdam& adam, const std::string& name, const at::Tensor& tensor, size_t group,
             const std::string& rule, int64_t axis, const std::optional<at::Tensor>& vectors, int64_t width,
             bool is_slice, bool is_coordinates) {
            translated([&] {
              adam.add({parameterOf(name, tensor, group, rule, axis, vectors, width, is_slice, is_coordinates)});
            });
          },
          py::arg("name"), py::arg("tensor"), py::kw_only(), py::arg("group"), py::arg("rule"), py::arg("axis") = 0,
          py::arg("vectors") = py::none(), py::arg("width") = 0, py::arg("is_slice") = false,
          py::arg("is_coordinates") = false)
      .def(
          "project",
          [](SubspaceAdam& adam, const Tensors& gradients) {
            return translated([&] { return adam.project(definedOf(gradients)); });
          },
          py::arg("gradients"), release())
      .def(
          "squares",
          [](const SubspaceAdam& adam, const Tensors& gradients) {
            return translated([&] { return adam.squares(definedOf(gradients)); });
          },
          py::arg("gradients"), release())
      .def(
          "form",
          [](SubspaceAdam& adam, const std::vector<at::Tensor>& parameters, const Tensors& gradients,
             const std::vector<Rule>& rules, double scale) {
            return translated([&] { return adam.form(parameters, definedOf(gradients), rulesOf(rules), scale); });
          },
          py::arg("parameters"), py::arg("gradients"), py::arg("rules"), py::arg("scale"), release())
      .def(
          "apply",
          [](SubspaceAdam& adam, const std::vector<at::Tensor>& parameters, const std::vector<Rule>& rules) {
            translated([&] { adam.apply(parameters, rulesOf(rules)); });
          },
          py::arg("parameters"), py::arg("rules"), release())
      .def("state", [](const SubspaceAdam& adam) { return translated([&] { return adam.state(); }); })
      .def(
          "load",
          [](SubspaceAdam& adam, const std::vector<SubspaceAdam::State>& state) {
            translated([&] { adam.load(state); });
          },
          py::arg("state"));
}

}  // namespace lowcomm

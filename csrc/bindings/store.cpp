#include "backend/store.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace lowcomm {

void bindStore(py::module_& m) {
  py::class_<PortStore, c10d::Store, c10::intrusive_ptr<PortStore>>(py::handle(), "PortStore");  // by these two alone
  m.def("serve_store", &PortStore::serve, py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
  m.def("dial_store", &PortStore::dial, py::arg("address"), py::arg("timeout"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace lowcomm

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "bindings/bindings.h"
#include "subspace/boundary.h"
#include "tensor/errors.h"
#include "tensor/product.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

SubspaceAnchor anchorOf(uint64_t seed, double scale, int64_t width, bool normal,
                        const std::optional<at::Tensor>& positions) {
  return {{seed, static_cast<float>(scale), static_cast<size_t>(width)}, normal, positions};
}

}  // namespace

void bindSubspace(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  // float64 [rank, width], orthonormal rows.
  m.def(
      "subspace_basis",
      [](int64_t rank, int64_t width, uint64_t seed) {
        return translated([&] {
          if (rank < 0 || width < 0) {
            throw ValueError("subspace: expected a rank and a width above 0, got " + std::to_string(rank) + " and " +
                             std::to_string(width));
          }
          const bool drawn = rank > 0 && rank <= width;  // else drawBasis says so
          at::Tensor rows = at::empty({drawn ? rank : 0, width}, at::kDouble);
          drawBasis(rows.mutable_data_ptr<double>(), static_cast<size_t>(rank), static_cast<size_t>(width), seed);
          return rows;
        });
      },
      py::arg("rank"), py::arg("width"), py::arg("seed"), release());
  // a·b, [m, k] by [k, n].
  m.def(
      "product", [](const at::Tensor& a, const at::Tensor& b) { return translated([&] { return product(a, b); }); },
      py::arg("a"), py::arg("b"), release());
  m.def(
      "subspace_encode",
      [](const at::Tensor& x, const at::Tensor& ids, const at::Tensor& rows, uint64_t seed, double scale, bool normal,
         const std::optional<at::Tensor>& positions, int64_t vocabulary) {
        return translated([&] {
          return subspaceEncode(x, ids, rows, anchorOf(seed, scale, rows.size(-1), normal, positions), vocabulary);
        });
      },
      py::arg("x"), py::arg("ids"), py::arg("rows"), py::kw_only(), py::arg("seed"), py::arg("scale"),
      py::arg("normal"), py::arg("positions"), py::arg("vocabulary"), release());
  m.def(
      "subspace_decode",
      [](const at::Tensor& coefficients, const at::Tensor& ids, const at::Tensor& rows, uint64_t seed, double scale,
         bool normal, const std::optional<at::Tensor>& positions, int64_t vocabulary, at::ScalarType dtype) {
        return translated([&] {
          return subspaceDecode(coefficients, ids, rows, anchorOf(seed, scale, rows.size(-1), normal, positions),
                                vocabulary, dtype);
        });
      },
      py::arg("coefficients"), py::arg("ids"), py::arg("rows"), py::kw_only(), py::arg("seed"), py::arg("scale"),
      py::arg("normal"), py::arg("positions"), py::arg("vocabulary"), py::arg("dtype"), release());
  m.def(
      "subspace_anchor",
      [](const at::Tensor& ids, int64_t width, uint64_t seed, double scale, bool normal,
         const std::optional<at::Tensor>& positions, int64_t vocabulary, at::ScalarType dtype) {
        return translated(
            [&] { return subspaceAnchor(ids, anchorOf(seed, scale, width, normal, positions), vocabulary, dtype); });
      },
      py::arg("ids"), py::arg("width"), py::kw_only(), py::arg("seed"), py::arg("scale"), py::arg("normal"),
      py::arg("positions"), py::arg("vocabulary"), py::arg("dtype"), release());
}

}  // namespace lowcomm

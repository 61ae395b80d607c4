#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/bound_codec.h"
#include "codec/codec.h"
#include "codec/level_table.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

using Channels = BoundCodec::Channels;
using Given = BoundCodec::Given;

// encode() or roundtrip() as a Python method, whose random draws are given by seed, stream and step.
auto drawing(at::Tensor (BoundCodec::*method)(const at::Tensor&, const Draws&, const Given&) const) {
  return [method](const BoundCodec& self, const at::Tensor& x, uint64_t seed, uint32_t stream, uint64_t step,
                  const Given& table, const Given& out) {
    py::gil_scoped_release released;
    return asPythonErrors(
        [&] { return (self.with(table).*method)(x, {seed, stream, static_cast<uint32_t>(step)}, out); });
  };
}

constexpr const char* kClassDoc =
    R"(Turns tensors into the bytes that travel, and back. Made by :func:`torch_lowcomm.codec`.

Stateless and safe to use from several threads. The byte format is csrc/wire/FORMAT.md.)";

constexpr const char* kEncodeDoc = R"(Encodes a tensor.

Args:
    x: CPU tensor of any shape, taken flattened in row-major order (made contiguous where it is not). ``none`` takes
        every real dtype, the others float32, float16 and bfloat16. With ``axis=channel`` its last dimension holds the
        channels, unless the codec's text has their number.
    seed: Key of the random numbers, 64 bits. Only ``qsgd`` and ``lattice`` draw any.
    stream: phase * 2**30 + rank * 2**16 + slot; see FORMAT.md, "Randomness".
    step: Training step, taken modulo 2**32. Equal arguments give equal bytes on every machine.
    table: For ``levels<b>``, its 2**b levels: a 1-D float32 CPU tensor within 0...1, strictly increasing.
    out: Memory for the payload, and what is returned then: a contiguous uint8 CPU tensor of as many elements as the
        payload has bytes, without requires_grad, that does not overlap with ``x``. Without it the payload is in memory
        of the codec's own, of which up to 256 MiB are kept from results that are gone. Unspecified after an error.

Returns:
    1-D uint8 CPU tensor of ``encoded_bytes(x.numel(), x.dtype)`` bytes, or ``out``.

Raises:
    TypeError: The codec does not take the dtype, ``table`` is not 1-D float32, or ``out`` is not uint8.
    ValueError: An element is NaN, infinite or, except for casts, 2**126 or more in magnitude (2**120 where the codec rotates)
        under ``nonfinite=error`` (the first one's position is named), the tensor is not a dense CPU tensor, ``table`` is
        missing, of another size, no table of levels, or of a codec that takes none, or ``out`` is not what it must
        be.)";

constexpr const char* kDecodeDoc = R"(Decodes a payload. Needs no seed.

Args:
    payload: 1-D uint8 CPU tensor as :meth:`encode` returned it.
    numel: Elements of the encoded tensor.
    channels: With ``axis=channel`` the size of the encoded tensor's last dimension, where the codec's text has none.
    dtype: Of the result, for ``none`` that of the encoded tensor; None for ``out``'s, or float32 without one.
    table: For ``levels<b>``, the one that :meth:`encode` was given.
    out: Memory for the result, and what is returned then: a contiguous CPU tensor of ``numel`` elements in any shape, as in
        :meth:`encode`.

Returns:
    1-D CPU tensor of ``numel`` elements, or ``out``.

Raises:
    TypeError: The payload is not 1-D uint8, the codec does not take ``dtype``, ``table`` is not 1-D float32, or ``out`` is not of
        ``dtype``.
    ValueError: The payload has the wrong size, or is none: a bit that must be 0 is not, a scale is not finite. Or
        ``table`` is not what the codec needs, or ``out`` is not what it must be.)";

constexpr const char* kRoundtripDoc =
    R"(What the receivers of ``x`` would see: decode(encode(x)), in x's shape and dtype.

Takes and raises what :meth:`encode` does; ``out`` is of x's shape and dtype, and may be ``x`` itself.)";

constexpr const char* kBytesDoc = R"(Exact size of a payload in bytes.

Args:
    numel: Elements; 0 gives 0.
    dtype: Of the elements. Only ``none`` depends on it.
    channels: As in :meth:`decode`.

Raises:
    TypeError: The codec does not take the dtype.
    ValueError: numel is negative, or no whole number of rows of channels.)";

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

// Tables of the levels codecs, and how they are learned.
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
  py::class_<LevelLearning>(m, "LevelLearning", "QSDP's Algorithm 2: see csrc/codec/level_table.h.")
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

}  // namespace

void bindCodec(py::module_& m) {
  m.def(
      "caution",
      [](const std::string& spec) { return asPythonErrors([&] { return caution(CodecSpec::parse(spec)); }); },
      py::arg("spec"), "A sentence where the codec is allowed but hardly ever what was meant, else None.");
  m.def(
      "ties_all",
      [](const std::string& spec) {
        const char* what = asPythonErrors([&] { return tiesAll(CodecSpec::parse(spec)); });
        return std::string(what ? what : "");
      },
      py::arg("spec"), "What makes each value depend on all elements of a tensor, 'axis=channel' say; '' for nothing.");
  m.def("codec_names", &codecNames, "Codec names this build knows with their bit ranges, comma-separated.");
  py::class_<BoundCodec>(m, "Codec", kClassDoc)
      .def(py::init([](const std::string& spec) {
             return asPythonErrors([&] { return std::make_unique<BoundCodec>(spec); });
           }),
           py::arg("spec"))
      .def("encode", drawing(&BoundCodec::encode), kEncodeDoc, py::arg("x"), py::kw_only(), py::arg("seed") = 0,
           py::arg("stream") = 0, py::arg("step") = 0, py::arg("table") = py::none(), py::arg("out") = py::none())
      .def(
          "decode",
          [](const BoundCodec& self, const at::Tensor& payload, int64_t numel, const Channels& channels,
             std::optional<at::ScalarType> dtype, const Given& table, const Given& out) {
            py::gil_scoped_release released;
            return asPythonErrors([&] { return self.with(table).decode(payload, numel, channels, dtype, out); });
          },
          kDecodeDoc, py::arg("payload"), py::arg("numel"), py::kw_only(), py::arg("channels") = py::none(),
          py::arg("dtype") = py::none(), py::arg("table") = py::none(), py::arg("out") = py::none())
      .def("roundtrip", drawing(&BoundCodec::roundtrip), kRoundtripDoc, py::arg("x"), py::kw_only(),
           py::arg("seed") = 0, py::arg("stream") = 0, py::arg("step") = 0, py::arg("table") = py::none(),
           py::arg("out") = py::none())
      .def(
          "encoded_bytes",
          [](const BoundCodec& self, int64_t numel, at::ScalarType dtype, const Channels& channels) {
            return asPythonErrors([&] { return self.encodedBytes(numel, dtype, channels); });
          },
          kBytesDoc, py::arg("numel"), py::arg("dtype") = at::kFloat, py::kw_only(), py::arg("channels") = py::none())
      .def_property_readonly(
          "spec", [](const BoundCodec& self) { return self.spec().str(); }, "Canonical text of the codec.")
      .def_property_readonly(
          "bits", [](const BoundCodec& self) { return static_cast<int>(self.spec().bits); },
          "Bits of a code; 0 for codecs that are no grid.")
      .def_property_readonly(
          "bucket", [](const BoundCodec& self) { return self.spec().axis == Axis::flat ? self.spec().bucket : 0; },
          "Elements that share a scale, topk's chunk; 0 for codecs with neither, ``bucket=tensor``, ``axis=channel``.")
      .def("__repr__", [](const BoundCodec& self) { return "codec('" + self.spec().str() + "')"; });
  bindLevels(m);
}

}  // namespace lowcomm

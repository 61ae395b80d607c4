#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "codec/codec.h"
#include "codec/error.h"
#include "codec/level_table.h"
#include "state/wire_type.h"

namespace py = pybind11;

namespace lowcomm {
namespace {

// Far above any tensor, low enough that no size computed from it overflows.
constexpr int64_t kMostElements = int64_t{1} << 56;

// The element type of a tensor that a codec reads; those the wire only carries are refused.
DType wireTypeOf(at::ScalarType type) {
  const DType dtype = wireType(type);
  if (dtype == DType::opaque) {
    throw TypeError(std::string("codec: expected a real floating, integer or bool dtype, got ") + c10::toString(type));
  }
  return dtype;
}

at::Tensor hostTensor(const at::Tensor& x, const char* name) {
  if (!x.device().is_cpu() || x.layout() != at::kStrided) {
    throw ValueError(std::string(name) + ": expected a dense CPU tensor, got one on " + x.device().str() +
                     (x.layout() == at::kStrided ? "" : " that is not strided"));
  }
  return x.detach().resolve_conj().resolve_neg().contiguous();
}

uint64_t checkedCount(int64_t numel) {
  if (numel < 0 || numel > kMostElements) {
    throw ValueError("numel: expected 0...2^56, got " + std::to_string(numel));
  }
  return static_cast<uint64_t>(numel);
}

using Channels = std::optional<int64_t>;
using Table = std::optional<at::Tensor>;

struct BoundCodec {
  explicit BoundCodec(const std::string& text) : spec(CodecSpec::parse(text)) {
    if (!spec.open()) codec = makeCodec(spec);
  }

  // This codec with a caller's level table, or as it is.
  BoundCodec with(const Table& table) const {
    if (!table) return *this;
    if (!codec) throw ValueError(spec.str() + ": expected no level table, got one");
    const at::Tensor values = hostTensor(*table, "table");
    if (values.scalar_type() != at::kFloat || values.dim() != 1) {
      throw TypeError(std::string("table: expected a 1-D float32 tensor, got ") + std::to_string(values.dim()) + "-D " +
                      c10::toString(values.scalar_type()));
    }
    const float* first = values.const_data_ptr<float>();
    BoundCodec bound = *this;
    bound.codec = codec->with(LevelTable({first, first + values.numel()}));
    return bound;
  }

  // The codec of a call: with axis=channel and no C in the text it is the call's. Without elements any C serves, for
  // the payload is empty: a tensor [5, 0] has no channels to have scales.
  std::shared_ptr<const Codec> codecFor(const Channels& channels, int64_t numel) const {
    if (channels && spec.axis != Axis::channel) {
      throw ValueError(spec.str() + ": channels: expected none without axis=channel, got " + std::to_string(*channels));
    }
    if (channels && *channels < 0) {
      throw ValueError(spec.str() + ": channels: expected " + kGridChannels + ", got " + std::to_string(*channels));
    }
    if (channels && numel == 0 && spec.open()) return makeCodec(spec.withChannels(1));
    if (channels) return makeCodec(spec.withChannels(static_cast<uint64_t>(*channels)));
    if (!codec) throw ValueError(spec.str() + ": channels: expected their number, got none");
    return codec;
  }

  Channels channelsOf(const at::Tensor& x) const {
    if (!spec.open()) return std::nullopt;
    if (x.dim() == 0) throw ValueError(spec.str() + ": x: expected a tensor with a last dimension, got a scalar");
    return x.size(-1);
  }

  static size_t bytesOf(const Codec& of, int64_t numel, at::ScalarType dtype) {
    const DType type = wireTypeOf(dtype);
    if (!of.supports(type)) {
      throw TypeError(of.spec().str() + ": expected float32, float16 or bfloat16, got " + dtypeName(type));
    }
    return of.encodedBytes(checkedCount(numel), type);
  }

  at::Tensor encode(const at::Tensor& x, const Draws& draws) const {
    const at::Tensor source = hostTensor(x, "x");
    const auto own = codecFor(channelsOf(x), x.numel());
    const size_t bytes = bytesOf(*own, source.numel(), source.scalar_type());
    at::Tensor payload = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
    own->encode({static_cast<std::byte*>(payload.data_ptr()), bytes}, source.const_data_ptr(),
                wireTypeOf(source.scalar_type()), 0, static_cast<uint64_t>(source.numel()), draws);
    return payload;
  }

  at::Tensor decode(const at::Tensor& payload, int64_t numel, const Channels& channels, at::ScalarType dtype) const {
    const auto own = codecFor(channels, numel);
    const at::Tensor source = hostTensor(payload, "payload");
    if (source.scalar_type() != at::kByte || source.dim() != 1) {
      throw TypeError(std::string("payload: expected a 1-D uint8 tensor, got ") + std::to_string(source.dim()) + "-D " +
                      c10::toString(source.scalar_type()));
    }
    const size_t bytes = bytesOf(*own, numel, dtype);
    if (bytes != static_cast<size_t>(source.numel())) {  // before memory for numel elements is asked for
      throw ValueError(own->spec().str() + ": payload of " + std::to_string(numel) + " elements: expected " +
                       std::to_string(bytes) + " bytes, got " + std::to_string(source.numel()));
    }
    at::Tensor y = at::empty({numel}, dtype);
    own->decode(y.data_ptr(), wireTypeOf(dtype), {static_cast<const std::byte*>(source.const_data_ptr()), bytes}, 0,
                static_cast<uint64_t>(numel));
    return y;
  }

  CodecSpec spec;
  std::shared_ptr<const Codec> codec;  // null while the number of channels is open
};

constexpr const char* kClassDoc =
    R"(Turns tensors into the bytes that travel, and back. Made by :func:`torch_lowcomm.codec`.

Stateless and safe to use from several threads. The byte format is csrc/wire/FORMAT.md.)";

constexpr const char* kEncodeDoc = R"(Encodes a tensor.

Args:
    x: CPU tensor of any shape, taken flattened in row-major order (made contiguous where it is not). ``none`` takes
        every real dtype, the others float32, float16 and bfloat16. With ``axis=channel`` its last dimension holds the
        channels, unless the codec's text has their number.
    seed: Key of the random numbers, 64 bits. Only ``qsgd``, ``dither``, ``lattice`` and ``bf16:round=stochastic`` draw
        any.
    stream: phase * 2**30 + rank * 2**16 + slot; see FORMAT.md, "Randomness".
    step: Training step, taken modulo 2**32. Equal arguments give equal bytes on every machine.
    table: For ``levels<b>``, its 2**b levels: a 1-D float32 CPU tensor within 0...1, strictly increasing.

Returns:
    1-D uint8 CPU tensor of ``encoded_bytes(x.numel(), x.dtype)`` bytes.

Raises:
    TypeError: The codec does not take the dtype, or ``table`` is not 1-D float32.
    ValueError: An element is NaN, infinite or, but for casts, 2**126 or more in magnitude (2**120 where the codec rotates)
        under ``nonfinite=error`` (the first one's position is named), a bucket's range is above what ``delta`` spans, the
        tensor is not a dense CPU tensor, or ``table`` is missing, of another size, no table of levels, or of a codec
        that takes none.)";

constexpr const char* kDecodeDoc = R"(Decodes a payload. Needs no seed.

Args:
    payload: 1-D uint8 CPU tensor as :meth:`encode` returned it.
    numel: Elements of the encoded tensor.
    channels: With ``axis=channel`` the size of the encoded tensor's last dimension, where the codec's text has none.
    dtype: Of the result; for ``none`` that of the encoded tensor.
    table: For ``levels<b>``, the one that :meth:`encode` was given.

Returns:
    1-D CPU tensor of ``numel`` elements.

Raises:
    TypeError: The payload is not 1-D uint8, the codec does not take ``dtype``, or ``table`` is not 1-D float32.
    ValueError: The payload has the wrong size, or is none: a bit that must be 0 is not, a scale is not finite. Or
        ``table`` is not what the codec needs.)";

constexpr const char* kRoundtripDoc =
    R"(What the receivers of ``x`` would see: decode(encode(x)), in x's shape and dtype.

Takes and raises what :meth:`encode` does.)";

constexpr const char* kBytesDoc = R"(Exact size of a payload in bytes.

Args:
    numel: Elements; 0 gives 0.
    dtype: Of the elements. Only ``none`` depends on it.
    channels: As in :meth:`decode`.

Raises:
    TypeError: The codec does not take the dtype.
    ValueError: numel is negative, or no whole number of rows of channels.)";

}  // namespace

void bindCodec(py::module_& m) {
  m.def(
      "caution",
      [](const std::string& spec) { return asPythonErrors([&] { return caution(CodecSpec::parse(spec)); }); },
      py::arg("spec"), "A sentence where the codec is allowed but hardly ever what was meant, else None.");
  m.def("codec_names", &codecNames, "Codec names this build knows with their bit ranges, comma-separated.");
  py::class_<BoundCodec>(m, "Codec", kClassDoc)
      .def(py::init([](const std::string& spec) {
             return asPythonErrors([&] { return std::make_unique<BoundCodec>(spec); });
           }),
           py::arg("spec"))
      .def(
          "encode",
          [](const BoundCodec& self, const at::Tensor& x, uint64_t seed, uint32_t stream, uint64_t step,
             const Table& table) {
            py::gil_scoped_release released;
            return asPythonErrors(
                [&] { return self.with(table).encode(x, {seed, stream, static_cast<uint32_t>(step)}); });
          },
          kEncodeDoc, py::arg("x"), py::kw_only(), py::arg("seed") = 0, py::arg("stream") = 0, py::arg("step") = 0,
          py::arg("table") = py::none())
      .def(
          "decode",
          [](const BoundCodec& self, const at::Tensor& payload, int64_t numel, const Channels& channels,
             at::ScalarType dtype, const Table& table) {
            py::gil_scoped_release released;
            return asPythonErrors([&] { return self.with(table).decode(payload, numel, channels, dtype); });
          },
          kDecodeDoc, py::arg("payload"), py::arg("numel"), py::kw_only(), py::arg("channels") = py::none(),
          py::arg("dtype") = at::kFloat, py::arg("table") = py::none())
      .def(
          "roundtrip",
          [](const BoundCodec& self, const at::Tensor& x, uint64_t seed, uint32_t stream, uint64_t step,
             const Table& table) {
            py::gil_scoped_release released;
            return asPythonErrors([&] {
              const BoundCodec codec = self.with(table);
              const at::Tensor payload = codec.encode(x, {seed, stream, static_cast<uint32_t>(step)});
              return codec.decode(payload, x.numel(), codec.channelsOf(x), x.scalar_type()).view(x.sizes());
            });
          },
          kRoundtripDoc, py::arg("x"), py::kw_only(), py::arg("seed") = 0, py::arg("stream") = 0, py::arg("step") = 0,
          py::arg("table") = py::none())
      .def(
          "encoded_bytes",
          [](const BoundCodec& self, int64_t numel, at::ScalarType dtype, const Channels& channels) {
            return asPythonErrors([&] { return BoundCodec::bytesOf(*self.codecFor(channels, numel), numel, dtype); });
          },
          kBytesDoc, py::arg("numel"), py::arg("dtype") = at::kFloat, py::kw_only(), py::arg("channels") = py::none())
      .def_property_readonly(
          "spec", [](const BoundCodec& self) { return self.spec.str(); }, "Canonical text of the codec.")
      .def_property_readonly(
          "bits", [](const BoundCodec& self) { return static_cast<int>(self.spec.bits); },
          "Bits of a code; 0 for codecs that are no grid.")
      .def_property_readonly(
          "bucket", [](const BoundCodec& self) { return self.spec.axis == Axis::flat ? self.spec.bucket : 0; },
          "Elements that share a scale; 0 for codecs that are no grid, for ``bucket=tensor`` and ``axis=channel``.")
      .def("__repr__", [](const BoundCodec& self) { return "codec('" + self.spec.str() + "')"; });
}

}  // namespace lowcomm

#include "bindings/bound_codec.h"

#include <ATen/EmptyTensor.h>

#include <cstdint>

#include "base/error.h"
#include "codec/level_table.h"
#include "tensor/warm_memory.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

// Far above any tensor, low enough that no size computed from it overflows.
constexpr int64_t kMostElements = int64_t{1} << 56;

std::string describe(const at::Tensor& x) {
  return std::to_string(x.dim()) + "-D " + c10::toString(x.scalar_type());
}

// The element type of a tensor that a codec reads; those the wire only carries are refused.
DType wireTypeOf(at::ScalarType type) {
  const DType dtype = wireType(type);
  if (dtype == DType::opaque) {
    throw TypeError(std::string("codec: expected a real floating, integer or bool dtype, got ") + c10::toString(type));
  }
  return dtype;
}

void expectHost(const at::Tensor& x, const char* name) {
  if (!x.device().is_cpu() || x.layout() != at::kStrided) {
    throw ValueError(std::string(name) + ": expected a dense CPU tensor, got one on " + x.device().str() +
                     (x.layout() == at::kStrided ? "" : " that is not strided"));
  }
}

at::Tensor hostTensor(const at::Tensor& x, const char* name) {
  expectHost(x, name);
  return x.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor warmTensor(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::Tensor(
      at::detail::empty_generic(sizes, &warmMemory(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt));
}

// Memory of a caller's for `elements` of a dtype, which is about to be written from `source`.
at::Tensor writable(const at::Tensor& out, int64_t elements, at::ScalarType dtype, const at::Tensor& source) {
  expectHost(out, "out");
  if (out.scalar_type() != dtype) {
    throw TypeError(std::string("out: expected a tensor of ") + c10::toString(dtype) + ", got " + describe(out));
  }
  if (out.numel() != elements) {
    throw ValueError("out: expected " + std::to_string(elements) + " elements, got " + std::to_string(out.numel()));
  }
  if (!out.is_contiguous() || out.is_neg()) {
    throw ValueError("out: expected a contiguous tensor, got one that is a view of other strides or signs");
  }
  if (out.requires_grad()) throw ValueError("out: expected a tensor without requires_grad, got one with it");
  const auto at = reinterpret_cast<uintptr_t>(out.const_data_ptr());
  const auto from = reinterpret_cast<uintptr_t>(source.const_data_ptr());
  if (at < from + source.nbytes() && from < at + out.nbytes()) {
    throw ValueError("out: expected memory of its own, got some that overlaps with what is read");
  }
  out.unsafeGetTensorImpl()->bump_version();  // autograd is to see that what it has kept has changed
  return out;
}

uint64_t checkedCount(int64_t numel) {
  if (numel < 0 || numel > kMostElements) {
    throw ValueError("numel: expected 0...2^56, got " + std::to_string(numel));
  }
  return static_cast<uint64_t>(numel);
}

size_t bytesOf(const Codec& of, int64_t numel, at::ScalarType dtype) {
  const DType type = wireTypeOf(dtype);
  if (!of.supports(type)) {
    throw TypeError(of.spec().str() + ": expected float32, float16 or bfloat16, got " + dtypeName(type));
  }
  return of.encodedBytes(checkedCount(numel), type);
}

}  // namespace

BoundCodec::BoundCodec(const std::string& text) : spec_(CodecSpec::parse(text)) {
  if (!spec_.open()) codec_ = makeCodec(spec_);
}

BoundCodec BoundCodec::with(const Given& table) const {
  if (!table) return *this;
  if (!codec_) throw ValueError(spec_.str() + ": expected no level table, got one");
  const at::Tensor values = hostTensor(*table, "table");
  if (values.scalar_type() != at::kFloat || values.dim() != 1) {
    throw TypeError("table: expected a 1-D float32 tensor, got " + describe(values));
  }
  const float* first = values.const_data_ptr<float>();
  BoundCodec bound = *this;
  bound.codec_ = codec_->with(LevelTable({first, first + values.numel()}));
  return bound;
}

// The codec of a call: with axis=channel and no C in the text it is the call's. Without elements any C serves, for
// the payload is empty: a tensor [5, 0] has no channels to have scales.
std::shared_ptr<const Codec> BoundCodec::codecFor(const Channels& channels, int64_t numel) const {
  if (channels && spec_.axis != Axis::channel) {
    throw ValueError(spec_.str() + ": channels: expected none without axis=channel, got " + std::to_string(*channels));
  }
  if (channels && *channels < 0) {
    throw ValueError(spec_.str() + ": channels: expected " + kGridChannels + ", got " + std::to_string(*channels));
  }
  if (channels && numel == 0 && spec_.open()) return makeCodec(spec_.withChannels(1));
  if (channels) return makeCodec(spec_.withChannels(static_cast<uint64_t>(*channels)));
  if (!codec_) throw ValueError(spec_.str() + ": channels: expected their number, got none");
  return codec_;
}

BoundCodec::Channels BoundCodec::channelsOf(const at::Tensor& x) const {
  if (!spec_.open()) return std::nullopt;
  if (x.dim() == 0) throw ValueError(spec_.str() + ": x: expected a tensor with a last dimension, got a scalar");
  return x.size(-1);
}

size_t BoundCodec::encodedBytes(int64_t numel, at::ScalarType dtype, const Channels& channels) const {
  return bytesOf(*codecFor(channels, numel), numel, dtype);
}

at::Tensor BoundCodec::encode(const at::Tensor& x, const Draws& draws, const Given& out) const {
  const at::Tensor source = hostTensor(x, "x");
  const auto own = codecFor(channelsOf(x), x.numel());
  const auto bytes = static_cast<int64_t>(bytesOf(*own, source.numel(), source.scalar_type()));
  at::Tensor payload = out ? writable(*out, bytes, at::kByte, source) : warmTensor({bytes}, at::kByte);
  own->encode({static_cast<std::byte*>(payload.mutable_data_ptr()), static_cast<size_t>(bytes)},
              source.const_data_ptr(), wireTypeOf(source.scalar_type()), 0, static_cast<uint64_t>(source.numel()),
              draws);
  return payload;
}

at::Tensor BoundCodec::decode(const at::Tensor& payload, int64_t numel, const Channels& channels,
                              std::optional<at::ScalarType> dtype, const Given& out) const {
  const auto own = codecFor(channels, numel);
  const at::Tensor source = hostTensor(payload, "payload");
  if (source.scalar_type() != at::kByte || source.dim() != 1) {
    throw TypeError("payload: expected a 1-D uint8 tensor, got " + describe(source));
  }
  const at::ScalarType type = dtype ? *dtype : out ? out->scalar_type() : at::kFloat;
  const size_t bytes = bytesOf(*own, numel, type);
  if (bytes != static_cast<size_t>(source.numel())) {  // before memory for numel elements is asked for
    throw ValueError(own->spec().str() + ": payload of " + std::to_string(numel) + " elements: expected " +
                     std::to_string(bytes) + " bytes, got " + std::to_string(source.numel()));
  }
  at::Tensor y = out ? writable(*out, numel, type, source) : warmTensor({numel}, type);
  own->decode(y.mutable_data_ptr(), wireTypeOf(type), {static_cast<const std::byte*>(source.const_data_ptr()), bytes},
              0, static_cast<uint64_t>(numel));
  return y;
}

at::Tensor BoundCodec::roundtrip(const at::Tensor& x, const Draws& draws, const Given& out) const {
  if (out && out->sizes() != x.sizes()) {
    throw ValueError("out: expected a tensor of " + std::to_string(x.numel()) + " elements in x's shape, got one of " +
                     std::to_string(out->numel()) + " in its own");
  }
  const at::Tensor payload = encode(x, draws, std::nullopt);
  const at::Tensor y = decode(payload, x.numel(), channelsOf(x), x.scalar_type(), out);
  return out ? y : y.view(x.sizes());
}

}  // namespace lowcomm

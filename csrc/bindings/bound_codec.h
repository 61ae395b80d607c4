#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "codec/codec.h"

namespace lowcomm {

// A codec on tensors of the host, as Python has it. Results go into `out` where it is given, else into memory that
// earlier results had (tensor/warm_memory.h). Thread-safe. Throws ValueError, TypeError, and WireError of a payload.
class BoundCodec {
 public:
  using Channels = std::optional<int64_t>;  // given to a call
  using Given = std::optional<at::Tensor>;  // a level table, or memory for a result

  explicit BoundCodec(const std::string& text);

  // This codec with a caller's level table, or as it is.
  BoundCodec with(const Given& table) const;

  at::Tensor encode(const at::Tensor& x, const Draws& draws, const Given& out) const;
  // Into `out`'s dtype, else `dtype`, else float32.
  at::Tensor decode(const at::Tensor& payload, int64_t numel, const Channels& channels,
                    std::optional<at::ScalarType> dtype, const Given& out) const;
  // `out` may be x.
  at::Tensor roundtrip(const at::Tensor& x, const Draws& draws, const Given& out) const;
  size_t encodedBytes(int64_t numel, at::ScalarType dtype, const Channels& channels) const;

  const CodecSpec& spec() const { return spec_; }

 private:
  std::shared_ptr<const Codec> codecFor(const Channels& channels, int64_t numel) const;
  Channels channelsOf(const at::Tensor& x) const;

  CodecSpec spec_;
  std::shared_ptr<const Codec> codec_;  // null while the number of channels is open
};

}  // namespace lowcomm

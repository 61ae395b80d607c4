#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/narrow_float.h"
#include "codec/fused.h"
#include "grid_cases.h"

namespace lowcomm::test {

inline constexpr DType kTypes[] = {DType::float32, DType::float16, DType::bfloat16};
inline const Draws kDraws{0x0123456789abcdef, 3u << 16 | 5, 7};

inline const char* const kTexts[] = {"minmax4:bucket=64",
                                     "minmax8:bucket=1024,meta=bf16",
                                     "minmax4:bucket=4096",
                                     "qsgd3:bucket=512",
                                     "lattice4:bucket=1024",
                                     "sym4:bucket=1024",
                                     "sym7:bucket=64,meta=bf16,range=l2",
                                     "mid2:bucket=256",
                                     "sign1:bucket=64",
                                     "gauss4",
                                     "sym4:bucket=4096,rotate=1",
                                     "qsgd4:bucket=512,meta=bf16,rotate=1",
                                     "fp16",
                                     "bf16",
                                     "log9",
                                     "topk",
                                     "topk:chunk=64,keep=8",
                                     "minmax8:bucket=tensor"};

// Elements of one of the three types, and as the floats that they are.
struct Tensor {
  Tensor(const std::vector<float>& values, DType type) : dtype(type), bytes(elementsOf(type, values)) {}

  void set(size_t i, float value) { fromFloat(dtype, bytes.data() + i * itemBytes(dtype), value); }
  std::vector<float> floats() const { return floatsOf(dtype, bytes); }

  Elements elements() const { return {bytes.data(), dtype}; }
  State state() { return {bytes.data(), dtype}; }

  DType dtype;
  Bytes bytes;
};

// A codec of which nothing is known but what it does.
class Opaque final : public Codec {
 public:
  explicit Opaque(std::shared_ptr<const Codec> inner) : Codec(inner->spec()), inner_(std::move(inner)) {}
  uint64_t granularity() const override { return inner_->granularity(); }
  bool supports(DType dtype) const override { return inner_->supports(dtype); }
  size_t encodedBytes(uint64_t count, DType dtype) const override { return inner_->encodedBytes(count, dtype); }
  void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
              const Draws& draws) const override {
    inner_->encode(dst, src, dtype, first, count, draws);
  }
  void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const override {
    inner_->decode(dst, dtype, src, first, count);
  }
  void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                 uint64_t count) const override {
    inner_->decodeAdd(acc, dtype, src, first, count);
  }

 private:
  std::shared_ptr<const Codec> inner_;
};

inline std::shared_ptr<const Codec> codecOf(const std::string& text) {
  return makeCodec(CodecSpec::parse(text));
}

}  // namespace lowcomm::test

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/narrow_float.h"
#include "codec/codec.h"
#include "codec/spec.h"
#include "kernels/isa/table.h"
#include "kernels/philox.h"

namespace lowcomm {

// The part that all codecs of float32, float16 and bfloat16 elements share: the checks of a call and of a payload in
// their order, and what happens to elements that the codec does not take (`nonfinite=`). A derived class adds the
// layout of its payload and its loops.
class FloatCodec : public Codec {
 public:
  bool supports(DType dtype) const final { return isCoded(dtype); }
  void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
              const Draws& draws) const override;
  void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const final;
  void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const final;

  void expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count, const std::string& of) const override;

 protected:
  // `table` outlives the codec.
  FloatCodec(const CodecSpec& spec, const KernelTable& table);

  // Throws TypeError and ValueError for a run that the codec cannot take.
  virtual void checkRun(DType dtype, uint64_t first) const;
  // The same, and for a payload of another size. Returns false where there is nothing to encode.
  bool begin(std::span<std::byte> dst, DType dtype, uint64_t first, uint64_t count) const;

  // Fills `dst`, its padding included. Returns false when it met an element that the codec does not take; nothing
  // useful is then in dst.
  virtual bool encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                           const PhiloxKey& key) const = 0;
  // nonfinite=poison: sets every bucket, channel or single element that the codec does not take to 0 and returns their
  // numbers; then marks each of them in the payload.
  virtual std::vector<uint64_t> blankRefused(void*, DType, uint64_t /*count*/) const { return {}; }
  virtual void poison(std::span<std::byte> /*dst*/, uint64_t /*count*/, uint64_t /*number*/) const {}

  // Throws WireError for what is no payload of `count` elements.
  virtual void checkPayload(std::span<const std::byte> src, uint64_t count) const = 0;
  // Decodes a payload that was checked, count > 0, under FloatEnv: dst = its values, acc += its values.
  virtual void decodeTo(void* dst, DType dtype, std::span<const std::byte> src, uint64_t count) const = 0;
  virtual void addTo(float* acc, std::span<const std::byte> src, uint64_t count) const = 0;

  const std::string& name() const { return name_; }
  const KernelTable& table() const { return table_; }

  // The loops between a 16-bit type and fp32.
  auto widening(DType dtype) const {
    return dtype == DType::float16 ? table_.float16_to_float : table_.bfloat16_to_float;
  }
  auto narrowing(DType dtype) const {
    return dtype == DType::float16 ? table_.float_to_float16 : table_.float_to_bfloat16;
  }
  // Elements as fp32: where they are, or converted into `memory`.
  const float* floats(const void* src, DType dtype, uint64_t count, std::unique_ptr<float[]>& memory) const;

 private:
  bool encodePoisoned(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                      const PhiloxKey& key) const;

  const KernelTable& table_;
  std::string name_;
};

// The codecs of this kind that are used by their interface only; each source file names its codec. `table` outlives
// them.
std::shared_ptr<const Codec> makeCastCodec(const CodecSpec& spec, const KernelTable& table);
std::shared_ptr<const Codec> makeChannelCodec(const CodecSpec& spec, const KernelTable& table);
std::shared_ptr<const Codec> makeScalarCodec(const CodecSpec& spec, const KernelTable& table);
std::shared_ptr<const Codec> makeUnitCodec(const CodecSpec& spec, const KernelTable& table);
std::shared_ptr<const Codec> makeTopkCodec(const CodecSpec& spec, const KernelTable& table);
std::shared_ptr<const Codec> makeChunkedTopkCodec(const CodecSpec& spec, const KernelTable& table);

// The elements themselves, little-endian, filled with zeros to a multiple of 64 bytes. Takes every element type.
class NoneCodec final : public Codec {
 public:
  explicit NoneCodec(const CodecSpec& spec) : Codec(spec) {}

  uint64_t granularity() const override { return 512; }
  bool supports(DType dtype) const override { return itemBytes(dtype) != 0; }
  size_t encodedBytes(uint64_t count, DType dtype) const override;
  void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
              const Draws& draws) const override;
  void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const override;
  void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                 uint64_t count) const override;

  // The elements of a payload where they stand, for a reader that needs no copy. Throws as decode.
  static std::span<const std::byte> elements(DType dtype, std::span<const std::byte> src, uint64_t count);
};

}  // namespace lowcomm

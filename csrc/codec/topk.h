#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/grid.h"
#include "codec/spec.h"
#include "kernels/isa/table.h"

namespace lowcomm {

// Where the parts of a topk payload are. All 0 for no elements.
struct TopkParts {
  uint64_t n, k;  // elements, and how many of them are sent
  bool listed;    // places as a list, not as a bitmap
  size_t places;  // bytes of them, which follow the header
  size_t values;  // where the values begin

  static constexpr size_t kHeader = 16;  // k (8 bytes), codec and bits of the values, form of the places, 5 zeros
};

// Of `count` elements under `spec`, which misfit() has nothing against. Throws ValueError above 2^48 elements.
TopkParts topkParts(const CodecSpec& spec, uint64_t count);

// topk (FORMAT.md, "topk"): the share `keep` of a tensor's elements that is largest in magnitude, their places as a
// bitmap or a list, their values in a grid codec; the others decode to 0. Sparsification as in Aji and Heafield: Sparse
// Communication for Distributed Gradient Descent; EMNLP 2017. A tensor is not cut: which elements are sent depends on
// all of it.
class TopkCodec final : public Codec {
 public:
  // `table` outlives the codec; other than kernels() only in tests.
  TopkCodec(const CodecSpec& spec, const KernelTable& table);

  uint64_t granularity() const override { return kUncut; }
  bool supports(DType dtype) const override { return values_.supports(dtype); }
  size_t encodedBytes(uint64_t count, DType dtype) const override;
  void encode(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
              const Draws& draws) const override;
  void decode(void* dst, DType dtype, std::span<const std::byte> src, uint64_t first, uint64_t count) const override;
  void decodeAdd(float* acc, DType dtype, std::span<const std::byte> src, uint64_t first,
                 uint64_t count) const override;

  void expectTaken(const void* src, DType dtype, uint64_t first, uint64_t count, const std::string& of) const override;
  bool needsRepair(const void* src, DType dtype, uint64_t count) const override;
  void repair(void* x, DType dtype, uint64_t count) const override;

 private:
  void checkTensor(DType dtype, uint64_t first) const;
  // The largest elements of src, parts.n of them there: their places as a bitmap, themselves (and kSlack more floats).
  void select(uint64_t* bitmap, float* values, const void* src, DType dtype, const TopkParts& parts) const;
  // Throws WireError for what is no payload; its places as a bitmap, its values.
  void read(std::span<const std::byte> src, const TopkParts& parts, uint64_t* bitmap, float* values) const;

  const KernelTable& table_;
  std::string name_;
  GridCodec values_;
};

}  // namespace lowcomm

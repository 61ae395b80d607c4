#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/change.h"
#include "codec/family.h"
#include "codec/float_codec.h"
#include "codec/level_table.h"
#include "codec/spec.h"
#include "kernels/codebook/codebook.h"
#include "kernels/grid/grid_form.h"
#include "kernels/isa/table.h"
#include "kernels/philox.h"

namespace lowcomm {

inline constexpr uint64_t kCodeBlock = 512, kCodeLanes = 16;  // of codes (FORMAT.md, "Payload of a grid codec")

// The parts of a grid payload that do not depend on how its buckets lie.

// How the loops encode a family, and what else they must know of a codec (which misfit() has nothing against): its
// constants; its bucket is spec.bucket.
GridRule gridRule(const GridFamily& family);
GridForm gridForm(const CodecSpec& spec);

// The metadata of a codec's buckets or channels, one after another: base and step, or the step alone where none is
// sent.
struct GridScales {
  explicit GridScales(const CodecSpec& spec);

  size_t numbers;  // of a bucket
  size_t number_bytes;
  Meta meta;
  Nonfinite nonfinite;

  size_t bytes(uint64_t buckets) const { return numbers * number_bytes * buckets; }

  // The numbers of a poisoned bucket: NaN for the base, or for the step where no base is sent; else 0 for the step.
  void poison(std::byte* scales, uint64_t bucket) const;
  bool isPoison(const std::byte* scales, uint64_t bucket) const;

  // Throws WireError for a number that is not finite, except for poison where the codec has it. `of` names what a
  // bucket is: "bucket", "channel".
  void expectFinite(const std::byte* scales, uint64_t buckets, const std::string& codec, const char* of) const;
};

// Bytes of the blocks of `count` codes (FORMAT.md, "Payload of a grid codec").
size_t gridWordBytes(int bits, uint64_t count);

// Throws WireError for a bit of the last block that belongs to no element and is not 0.
void expectUnusedZero(std::span<const std::byte> words, int bits, uint64_t count, const std::string& codec,
                      bool rotated = false);

// The codecs of kGridFamilies (FORMAT.md, "Grid codecs"): a bucket's elements on 2^b evenly spaced values, which follow
// its range. float16 and bfloat16 are converted to fp32 on the way in and rounded on the way out;
// decodeAdd adds the fp32 value, not rounded to `dtype`.
//
// minmax (nearest) and qsgd (one of the two neighbours at random without bias) are the method of QSDP (Markov, Vladu,
// Guo, Alistarh: Quantized Distributed Training of Large Models with Convergence Guarantees; ICML 2023) for weights and
// for gradients; lattice is the rounding of its Definition 1 (a randomly shifted grid, variance step^2/12).
//
// sym and mid are grids around 0, sym with a level at 0 (AQ-SGD, DiLoCoX) and mid without (AQ-SGD's text: Wang et al.,
// Fine-tuning Language Models over Slow Networks using Activation Quantization with Guarantees; NeurIPS 2022); sign1
// has two levels. They send a step and no base.
//
// levels is a grid of unequal steps within a bucket's range (QSDP's learned levels); gauss has the best levels for a
// normal distribution, which the rotation before it makes of nearly any.
class GridCodec final : public FloatCodec, public ChangeCodec {
 public:
  // `table` outlives the codec; other than kernels() only in tests, which compare the forms. `part`: the bucket, a
  // power of two from 16 on, of a part of units (codec/units.cpp). Its buckets of fewer than 512 are rotated by
  // themselves, the signs of its rotation turn from block to block, and runs are of whole buckets.
  GridCodec(const CodecSpec& spec, const KernelTable& table, std::optional<uint32_t> part = {});

  // A levels codec with its table. Throws ValueError as Codec::with.
  GridCodec(const CodecSpec& spec, const KernelTable& table, const LevelTable& levels);

  uint64_t granularity() const override;  // kUncut with bucket=tensor
  size_t encodedBytes(uint64_t count, DType dtype) const override;
  std::optional<size_t> headBytes(uint64_t count, DType) const override;  // none with bucket=tensor
  void encodeMade(std::span<std::byte> dst, const MakePiece& make, uint64_t first, uint64_t count,
                  const Draws& draws) const override;
  std::shared_ptr<const Codec> with(const LevelTable& levels) const override;
  uint32_t stateVersion() const override { return version_; }

  // None of buckets that no piece holds, bucket=tensor among them.
  std::unique_ptr<Change> changeEncoder(std::span<std::byte> dst, uint64_t first, uint64_t count,
                                        const Draws& draws) const override;
  std::unique_ptr<Change> changeDecoder(std::span<const std::byte> src, uint64_t first, uint64_t count) const override;

 private:
  friend class GridDelta;
  friend class GridChange;
  friend class UnitCodec;

  uint32_t bucketOf(uint64_t count) const;
  GridForm formOf(uint64_t count) const;
  uint64_t codes(uint64_t count) const;    // of `count` elements: whole blocks where they are rotated
  size_t metaBytes(uint64_t count) const;  // without padding
  size_t wordBytes(uint64_t codes) const;

  void checkRun(DType dtype, uint64_t first) const override;
  bool encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                   const PhiloxKey& key) const override;
  bool encodeRotated(std::byte* meta, std::byte* words, float* x, uint64_t count, GridForm form, uint64_t block,
                     const PhiloxKey& key) const;
  std::vector<uint64_t> blankRefused(void* x, DType dtype, uint64_t count) const override;
  void poison(std::span<std::byte> dst, uint64_t count, uint64_t bucket) const override;

  void checkPayload(std::span<const std::byte> src, uint64_t count) const override;
  void decodeTo(void* dst, DType dtype, std::span<const std::byte> src, uint64_t count) const override;
  void addTo(float* acc, std::span<const std::byte> src, uint64_t count) const override;
  template <typename Take>
  void decodePieces(const std::byte* src, uint64_t count, const Take& take) const;
  // A payload of `count` elements, the first of which is the tensor's element `first`. n of them from `at` on, a
  // multiple of granularity(), are encoded and decoded by themselves; `rotated` has room for their whole blocks, and so
  // has y.
  struct Payload {
    std::byte* bytes;  // which a decoder only reads
    uint64_t first, count;
  };
  bool encodeAt(const Payload& payload, uint64_t at, const Piece& made, uint64_t n, float* rotated,
                const PhiloxKey& key) const;
  void decodeAt(float* y, const Payload& payload, uint64_t at, uint64_t n) const;
  bool encodePieces(std::span<std::byte> dst, uint64_t first, uint64_t count, const PhiloxKey& key,
                    const MakePiece& make) const;

  bool wholeBlocksOnly() const { return isRotated(spec()) && bucket_ >= kLeastRotatedBucket; }
  auto rotate() const { return table().rotation->rotate[rows_]; }
  auto unrotate(bool add) const { return table().rotation->unrotate[rows_][add]; }
  Blocks blocks(uint64_t at) const { return {at / kCodeBlock, of_units_}; }  // from element `at` on

  const uint32_t bucket_;  // spec().bucket, or that of a part
  const int rows_;         // rotated together, as RotationLoops counts them
  const bool of_units_;
  GridForm form_;
  KernelTable::EncodeGrid encode_;
  const KernelTable::DecodeGrid* decode_;  // [add]
  std::shared_ptr<const Codebook> book_;   // of levels, where it has a table
  uint32_t version_ = 0;
  GridScales scales_;
};

}  // namespace lowcomm

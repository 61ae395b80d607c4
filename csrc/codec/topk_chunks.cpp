// topk in chunks (FORMAT.md, "topk in chunks"): the `keep` elements of every chunk that are largest in magnitude, as in
// SparseLoCo (Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo; 2025). The places of a chunk have
// a fixed size, so a tensor may be cut where chunks end. A few chunks' values share a scale.
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/float_env.h"
#include "codec/float_codec.h"
#include "codec/grid.h"
#include "codec/nonfinite.h"
#include "codec/topk.h"
#include "kernels/select/select.h"

namespace lowcomm {
namespace {

class ChunkedTopkCodec final : public FloatCodec {
 public:
  ChunkedTopkCodec(const CodecSpec& spec, const KernelTable& table)
      : FloatCodec(spec, table),
        values_(valueSpec(spec), table),
        keep_(static_cast<uint64_t>(spec.keep)),
        low_bits_(std::countr_zero(spec.bucket / keep_)) {}

  // Where a chunk ends, a block of the values' codes, and a bucket of theirs.
  uint64_t granularity() const override { return std::max<uint64_t>(chunk(), values_.granularity() << low_bits_); }

  size_t encodedBytes(uint64_t count, DType) const override {
    return up64(placesBytes(count)) + values_.encodedBytes(kept(count), DType::float32);
  }

 private:
  uint64_t chunk() const { return spec().bucket; }

  // How many of the first `count` elements are sent; the last of them may be the end of a short chunk.
  uint64_t kept(uint64_t count) const { return (count >> low_bits_) + (count % (uint64_t{1} << low_bits_) != 0); }

  // Those of whole chunks are whole bytes of either kind.
  size_t placesBytes(uint64_t count) const { return chunkPlacesBytes(kept(count), low_bits_); }

  // Calls take(first element, elements, first value, values) for every chunk.
  template <typename Take>
  void eachChunk(uint64_t count, const Take& take) const {
    for (uint64_t at = 0; at < count; at += chunk()) {
      const uint64_t n = std::min(chunk(), count - at);
      take(at, n, at >> low_bits_, kept(n));
    }
  }

  // An element that is refused is larger than all that are not: some such element of its chunk is among the values.
  bool encodeTaken(std::span<std::byte> dst, const void* src, DType dtype, uint64_t first, uint64_t count,
                   const PhiloxKey& key) const override {
    FloatEnv env;
    const size_t padding = placesBytes(count), values_at = up64(padding);
    std::memset(dst.data() + padding, 0, values_at - padding);
    const uint64_t most = std::min(chunk(), count);
    std::vector<uint16_t> places(most + kSlack);
    std::vector<uint32_t> magnitudes(most + kSlack);
    std::vector<float> widened(dtype == DType::float32 ? 0 : most);
    const auto values = std::make_unique_for_overwrite<float[]>(kept(count));
    eachChunk(count, [&](uint64_t at, uint64_t n, uint64_t value, uint64_t k) {
      const float* x = widened.data();
      if (dtype == DType::float32) {
        x = static_cast<const float*>(src) + at;
      } else {
        widening(dtype)(widened.data(), static_cast<const uint16_t*>(src) + at, n);
      }
      table().select->largest(places.data(), magnitudes.data(), x, n, k);
      for (uint64_t i = 0; i < k; ++i)
        values[value + i] = x[places[i]];
      writeChunkPlaces(dst.data() + placesBytes(at), places.data(), k, low_bits_);
    });
    try {
      values_.encode(dst.subspan(values_at), values.get(), DType::float32, kept(first), kept(count),
                     {key.seed, key.stream, key.step});
    } catch (const NonFiniteError&) {
      return false;  // the caller's error names the element's place among all
    }
    return true;
  }

  void checkPayload(std::span<const std::byte> src, uint64_t count) const override {
    expectBytes<WireError>(name(), encodedBytes(count, DType::float32), src.size());
    const size_t padding = placesBytes(count);
    expectZero(src.subspan(padding, up64(padding) - padding), name(), "padding of the places");
  }

  // Decodes the values and calls take(values, places, first element, elements, number of values) for every chunk.
  template <typename T, typename Take>
  void eachSent(DType dtype, std::span<const std::byte> src, uint64_t count, const Take& take) const {
    const auto values = std::make_unique_for_overwrite<T[]>(kept(count));
    values_.decode(values.get(), dtype, src.subspan(up64(placesBytes(count))), 0, kept(count));
    std::vector<uint16_t> places(keep_);
    eachChunk(count, [&](uint64_t at, uint64_t n, uint64_t value, uint64_t k) {
      readChunkPlaces(places.data(), src.data() + placesBytes(at), k, low_bits_, n, name(), at / chunk());
      take(values.get() + value, places.data(), at, n, k);
    });
  }

  template <typename T>
  void scatter(T* y, DType dtype, std::span<const std::byte> src, uint64_t count) const {
    eachSent<T>(dtype, src, count, [&](const T* values, const uint16_t* places, uint64_t at, uint64_t n, uint64_t k) {
      std::memset(y + at, 0, n * sizeof(T));
      for (uint64_t i = 0; i < k; ++i)
        y[at + places[i]] = values[i];
    });
  }

  void decodeTo(void* dst, DType dtype, std::span<const std::byte> src, uint64_t count) const override {
    if (dtype == DType::float32) {
      scatter(static_cast<float*>(dst), dtype, src, count);
    } else {
      scatter(static_cast<uint16_t*>(dst), dtype, src, count);
    }
  }

  void addTo(float* acc, std::span<const std::byte> src, uint64_t count) const override {
    eachSent<float>(DType::float32, src, count,
                    [&](const float* values, const uint16_t* places, uint64_t at, uint64_t, uint64_t k) {
                      for (uint64_t i = 0; i < k; ++i)
                        acc[at + places[i]] += values[i];
                    });
  }

  GridCodec values_;
  const uint64_t keep_;
  const int low_bits_;  // of a place: one in 2^low_bits_ elements is sent
};

}  // namespace

std::shared_ptr<const Codec> makeChunkedTopkCodec(const CodecSpec& spec, const KernelTable& table) {
  return std::make_shared<ChunkedTopkCodec>(spec, table);
}

}  // namespace lowcomm

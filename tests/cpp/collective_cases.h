#pragma once

#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/narrow_float.h"
#include "codec/codec.h"
#include "grid_cases.h"
#include "wire/layout.h"

namespace lowcomm::test {

inline const std::vector<DType> kFloats = {DType::float32, DType::float16, DType::bfloat16};
inline const std::vector<DType> kAllTypes = {DType::opaque,  DType::float32, DType::float16, DType::bfloat16,
                                             DType::float64, DType::int8,    DType::uint8,   DType::int16,
                                             DType::int32,   DType::int64,   DType::boolean};

inline const std::vector<std::string> kCodecs = {"none",
                                                 "minmax1:bucket=64",
                                                 "minmax4",
                                                 "minmax8:bucket=65536",
                                                 "qsgd1",
                                                 "qsgd4:bucket=512",
                                                 "qsgd8",
                                                 "lattice4:bucket=64",
                                                 "sym4:bucket=128,meta=bf16",
                                                 "qsgd4:bucket=512,meta=bf16,rotate=1",
                                                 "gauss4",
                                                 "fp16",
                                                 "bf16",
                                                 "log9",
                                                 "topk",
                                                 "topk:chunk=64,keep=16,values=qsgd4",
                                                 "topk:keep=0.01,values=qsgd4",
                                                 "qsgd8:bucket=tensor",
                                                 "lattice4:axis=channel,C=24"};

inline std::vector<float> floatsOf(const Bytes& bytes) {
  return floatsOf(DType::float32, bytes);
}

// Values that every codec and reduction of the dtype takes: normal floats, any integer, 0 and 1 of bool.
inline Bytes randomTensor(DType dtype, uint64_t count, uint32_t seed) {
  Bytes x(count * itemBytes(dtype));
  std::mt19937 generator(seed);
  if (dtype == DType::float64) {
    for (uint64_t i = 0; i < count; ++i) {
      const double value = (static_cast<double>(generator()) / 4294967296.0 - 0.5) * 8;
      std::memcpy(x.data() + i * 8, &value, 8);
    }
  } else if (dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16) {
    return elementsOf(dtype, normal(count, seed));
  } else {
    for (std::byte& b : x)
      b = static_cast<std::byte>(dtype == DType::boolean ? generator() & 1 : generator());
  }
  return x;
}

inline Layout single(uint64_t count, const std::string& codec) {
  return Layout::single(count, CodecSpec::parse(codec));
}

// The draws of a rank's stochastic codecs.
inline Draws drawsOf(int rank, uint32_t slot = 0) {
  return {5, streamOf(rank, slot), 6};
}

// The count below n that a codec with channels takes; n itself for others.
inline uint64_t wholeRows(uint64_t n, const std::string& codec) {
  const CodecSpec spec = CodecSpec::parse(codec);
  return spec.axis == Axis::channel ? n - n % spec.bucket : n;
}

// Segments of all codecs, of none to a few buckets each: parameters of a model in one flat buffer.
inline Layout mixedLayout(size_t segments, uint32_t seed, uint64_t most = 3000) {
  std::mt19937 generator(seed);
  std::vector<Segment> parts;
  uint64_t at = 0;
  for (size_t i = 0; i < segments; ++i) {
    const uint64_t any = generator() % (most + 1);
    const std::string& codec = kCodecs[generator() % kCodecs.size()];
    const uint64_t count = wholeRows(any, codec);
    parts.push_back({at, count, CodecSpec::parse(codec)});
    at += count;
  }
  return Layout(parts);
}

// A rank's message: each segment's payload, encoded whole. How a message is cut must not show in the values.
inline std::vector<Bytes> encodedSegments(const Layout& layout, DType dtype, const Bytes& x, const Draws& draws) {
  std::vector<Bytes> payloads;
  for (const Segment& segment : layout.segments()) {
    const auto codec = makeCodec(segment.codec);
    Draws own = draws;
    own.stream += static_cast<uint32_t>(payloads.size());
    payloads.emplace_back(codec->encodedBytes(segment.count, dtype));
    codec->encode(payloads.back(), x.data() + segment.first * itemBytes(dtype), dtype, 0, segment.count, own);
  }
  return payloads;
}

// The definition of all_gather: everybody, the owner too, ends with the decoded value in `dtype`.
inline Bytes asDecoded(const Layout& layout, DType dtype, const Bytes& x, const Draws& draws) {
  Bytes y(x.size());
  const std::vector<Bytes> payloads = encodedSegments(layout, dtype, x, draws);
  for (size_t i = 0; i < payloads.size(); ++i) {
    const Segment& segment = layout.segments()[i];
    makeCodec(segment.codec)->decode(y.data() + segment.first * itemBytes(dtype), dtype, payloads[i], 0, segment.count);
  }
  return y;
}

// The definition of a peer's contribution to reduce_scatter: the decoded values in fp32, not rounded to `dtype`.
inline std::vector<float> decodedFloats(const Layout& layout, DType dtype, const Bytes& x, const Draws& draws) {
  std::vector<float> y(layout.elements());
  const std::vector<Bytes> payloads = encodedSegments(layout, dtype, x, draws);
  for (size_t i = 0; i < payloads.size(); ++i) {
    const Segment& segment = layout.segments()[i];
    if (segment.codec.id == CodecId::none) {
      for (uint64_t e = segment.first; e < segment.first + segment.count; ++e)
        y[e] = toFloat(dtype, x.data() + e * itemBytes(dtype));
    } else {
      makeCodec(segment.codec)->decode(y.data() + segment.first, DType::float32, payloads[i], 0, segment.count);
    }
  }
  return y;
}

// A tensor of a message, without its values.
struct TensorKind {
  TensorKind(Layout layout, DType dtype) : layouts{std::move(layout)}, dtype(dtype) {}
  TensorKind(std::vector<Layout> layouts, DType dtype) : layouts(std::move(layouts)), dtype(dtype) {}

  const Layout& of(int rank) const { return layouts[layouts.size() == 1 ? 0 : rank]; }

  std::vector<Layout> layouts;  // of every rank's part, or one for all
  DType dtype;
};

// Sizes about a granule, in every codec.
inline std::vector<TensorKind> edgeTensors(DType dtype) {
  std::vector<TensorKind> tensors;
  for (const std::string& codec : kCodecs) {
    for (uint64_t n : {0, 1, 511, 512, 513})
      tensors.push_back({single(wholeRows(n, codec), codec), dtype});
  }
  return tensors;
}

}  // namespace lowcomm::test

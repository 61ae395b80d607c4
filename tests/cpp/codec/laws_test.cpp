// What every codec that changes elements does, under every kernel form.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/grid_laws.h"
#include "codec/nonfinite.h"
#include "kernels/finite.h"

namespace lowcomm {
namespace {

using namespace test;

class Laws : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Codecs, Laws, testing::ValuesIn(test::allForms()), test::formName);

const Draws kDraws{5, streamOf(3, 2), 9};

const Texts kFlat = {"minmax4:bucket=64",
                     "minmax8:bucket=1024,meta=bf16",
                     "qsgd3:bucket=64",
                     "qsgd8:bucket=4096",
                     "lattice4:bucket=512",
                     "sym4:bucket=64",
                     "sym7:bucket=1024,meta=bf16,range=l2",
                     "sym2:bucket=16384,meta=bf16,range=l2",
                     "mid1:bucket=256",
                     "mid4:meta=bf16,range=l2",
                     "sign1:bucket=64",
                     "levels4:bucket=64",
                     "levels8:bucket=64"};

Texts operator+(Texts a, const Texts& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// The edge sizes of the codec, as whole rows or units where it takes no others.
std::vector<size_t> sizesOf(const CodecSpec& spec) {
  if (spec.axis == Axis::channel) {
    std::vector<size_t> sizes;
    for (size_t rows : {1, 2, 7, 31, 32, 64, 65, 200})
      sizes.push_back(rows * spec.bucket);
    return sizes;
  }
  if (spec.unit) return {spec.unit, 2 * spec.unit, 7 * spec.unit, 33 * spec.unit};
  return test::manySizes(spec.bucket ? spec.bucket : 512);
}

std::vector<float> elements(const CodecSpec& spec, size_t n) {
  const std::vector<float> x = normal(n, static_cast<uint32_t>(n), 3, 0.25f);
  return spec.axis == Axis::flat ? x : test::spread(x, spec.bucket);
}

// A place from which the codec encodes.
uint64_t placeOf(const Codec& codec, uint64_t wish) {
  return codec.granularity() == Codec::kUncut ? 0 : wish;
}

Texts everyShape() {
  Texts texts = kFlat + kRotated + Texts{"fp16", "bf16", "topk:chunk=512,keep=32,values=qsgd4"};
  for (size_t channels : {1, 2, 3, 5, 8, 15, 16, 17, 24, 48, 64, 100, 511, 512, 513, 1024}) {
    const std::string options = "axis=channel,C=" + std::to_string(channels);
    for (const char* family : {"minmax", "qsgd", "lattice", "sym", "mid"})
      texts.push_back(family + std::to_string(2 + channels % 7) + ":" + options);
    for (const char* text : {"minmax1:meta=bf16", "sym8:meta=bf16,range=l2", "mid3:range=l2", "sign1"})
      texts.push_back(test::withOption(text, options));
  }
  for (uint64_t unit : kUnitSizes) {
    for (const std::string& text : kUnitTexts)
      texts.push_back(test::withUnit(text, unit));
  }
  return texts;
}

// The same bytes and values at every size, also with few elements in the last block.
TEST_P(Laws, EqualToReference) {
  for (const std::string& text : everyShape()) {
    const auto c = anyCodec(text), reference = test::codecWithTable(text, *scalarKernels());
    const uint64_t first = placeOf(*c, (uint64_t{1} << 37) + c->granularity());
    for (size_t n : sizesOf(c->spec())) {
      const std::vector<float> x = elements(c->spec(), n);
      const Bytes payload = encoded(*c, x, kDraws, first);
      test::expectAsReference(*c, *reference, x, payload, decoded(*c, payload, n, first), kDraws, first);
      if (HasFatalFailure()) return;
    }
  }
}

// 16-bit elements are encoded as the floats that they are, and decoded to the nearest of the floats' values.
TEST_P(Laws, SixteenBitElementsAreConvertedFirst) {
  for (const std::string& text : Texts{
           "minmax8:bucket=1024", "qsgd4:bucket=64", "minmax3:bucket=65536", "qsgd5:bucket=4096", "lattice4:bucket=64",
           "sym8", "mid2:bucket=4096,range=l2", "sign1:bucket=65536", "gauss4", "qsgd4:bucket=4096,rotate=1",
           "sign1:bucket=65536,rotate=1", "fp16", "bf16", "topk:keep=0.1,values=sym8", "topk:chunk=256,keep=8",
           "qsgd4:axis=channel,C=16", "sym8:axis=channel,C=100", "gauss4:unit=576", "minmax8:bucket=tensor"}) {
    const auto c = anyCodec(text);
    const size_t whole = std::max<size_t>({1, c->spec().axis == Axis::channel ? c->spec().bucket : 1, c->spec().unit});
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      for (size_t count : {1, 513, 2048, 5000, 140000}) {
        const size_t n = (count + whole - 1) / whole * whole;
        SCOPED_TRACE(c->spec().str() + " of " + std::to_string(n) + " " + dtypeName(dtype));
        const Bytes narrow = test::elementsOf(dtype, normal(n, 5));
        const std::vector<float> x = test::floatsOf(dtype, narrow);
        Bytes payload(c->encodedBytes(n, dtype)), back(narrow.size());
        c->encode(payload, narrow.data(), dtype, 0, n, kDraws);
        ASSERT_EQ(payload, encoded(*c, x, kDraws));
        const std::vector<float> y = decoded(*c, payload, n);
        c->decode(back.data(), dtype, payload, 0, n);
        ASSERT_EQ(back, test::elementsOf(dtype, y));
        std::vector<float> sum = x;
        c->decodeAdd(sum.data(), dtype, payload, 0, n);
        for (size_t i = 0; i < n; ++i)
          ASSERT_EQ(sum[i], x[i] + y[i]) << i;
      }
    }
  }
}

TEST_P(Laws, CuttingChangesNothing) {
  for (const std::string& text :
       kRotated + Texts{"qsgd4:bucket=64", "qsgd3:bucket=1024", "minmax8:bucket=4096", "minmax1:bucket=512",
                        "lattice3:bucket=2048", "sym4:bucket=64", "mid3", "sign1:bucket=4096", "sym2:range=l2",
                        "topk:chunk=4096,keep=64,values=sym2", "topk:chunk=2048,keep=1024,values=lattice3"}) {
    const auto c = anyCodec(text);
    const uint64_t granule = c->granularity(), n = (granule > 8192 ? 1 : 5) * granule + 333;
    const std::vector<float> x = normal(n, 2), whole = decoded(*c, encoded(*c, x, kDraws), n);
    std::vector<float> pieces;
    for (uint64_t first = 0; first < n; first += granule) {
      const std::vector<float> piece(x.begin() + first, x.begin() + std::min(n, first + granule));
      const std::vector<float> y = decoded(*c, encoded(*c, piece, kDraws, first), piece.size(), first);
      pieces.insert(pieces.end(), y.begin(), y.end());
    }
    EXPECT_EQ(whole, pieces) << text;
  }
}

const Texts kRefusing = {"minmax8:bucket=64",
                         "qsgd4:bucket=1024",
                         "minmax1:bucket=4096",
                         "lattice3:bucket=128",
                         "sym4:bucket=64",
                         "mid8",
                         "sign1:bucket=4096",
                         "sym2:range=l2",
                         "gauss2",
                         "minmax4:bucket=4096,rotate=1",
                         "levels4:bucket=64",
                         "fp16",
                         "bf16",
                         "topk:keep=0.01",
                         "topk:chunk=512,keep=32",
                         "minmax4:axis=channel,C=1",
                         "sign1:axis=channel,C=1",
                         "minmax4:bucket=256,unit=1"};

TEST_P(Laws, NonFiniteIsRefusedWithItsPosition) {
  for (const std::string& text : kRefusing) {
    const auto c = anyCodec(text);
    const uint64_t first = placeOf(*c, 8192);
    const float limit = finiteLimit(c->spec());
    for (size_t n : {1, 17, 513, 5000}) {
      for (size_t at : {size_t{0}, size_t{15}, size_t{16}, size_t{31}, size_t{32}, size_t{64}, size_t{511}, size_t{512},
                        size_t{1024}, size_t{4095}, size_t{4096}, n - 1}) {
        if (at >= n) continue;
        for (float value : {NAN, -NAN, INFINITY, -INFINITY, limit, -limit, 0x1p126f, 3e38f}) {
          if (std::fabs(value) < limit) continue;
          std::vector<float> x = normal(n, 1);
          x[at] = value;
          x[n - 1] = value;
          std::string what;
          const uint64_t refused = test::refusedElement([&] { encoded(*c, x, {}, first); }, &what);
          ASSERT_EQ(refused, first + at) << text << " of " << n << ": " << what;
          ASSERT_EQ(what.find("below 2^120") != std::string::npos, limit == kRotatedLimit) << what;
          ASSERT_EQ(what.find("2^126") != std::string::npos, limit == kFiniteLimit) << what;
        }
        std::vector<float> x = normal(n, 1);
        x[at] = std::nextafter(std::min(limit, 60000.0f), 0.0f);
        for (float v : decoded(*c, encoded(*c, x), n))
          ASSERT_TRUE(std::isfinite(v)) << text;
      }
    }
    std::vector<uint16_t> half(3000, 0x3c00);
    half[2500] = 0x7c00;
    EXPECT_EQ(test::refusedElement([&] { encoded(*c, half, {}, 0, DType::float16); }), 2500u) << text;
  }
}

const float kBad[] = {NAN, -NAN, INFINITY, -INFINITY, 0x1p126f, -3e38f};

// By the format: NaN where the first number of the bucket, or channel, stands, 0 for the other.
void expectPoisonedScale(const CodecSpec& spec, const Bytes& payload, size_t bucket) {
  const size_t numbers = gridFamily(spec.id)->centred ? 1 : 2, bytes = spec.meta == Meta::bf16 ? 2 : 4;
  Bytes expected(numbers * bytes);
  expected[bytes - 1] = std::byte{0x7f};
  expected[bytes - 2] = std::byte{0xc0};
  EXPECT_EQ(std::memcmp(payload.data() + bucket * expected.size(), expected.data(), expected.size()), 0) << spec.str();
}

// A bucket, or a channel, decodes to NaN and holds nothing but it; the others are as if it held zeros. A reader that
// expects none refuses it.
TEST_P(Laws, PoisonSpoilsItsBucketAlone) {
  const Texts channels = {"minmax4:axis=channel,C=24", "qsgd3:axis=channel,C=24", "lattice4:axis=channel,C=24",
                          "sym4:axis=channel,C=24", "sign1:axis=channel,C=24"};
  for (const std::string& text : kFlat + kRotated + channels) {
    const auto plain = anyCodec(text), c = anyCodec(test::withOption(text, "nonfinite=poison"));
    const size_t bucket = c->spec().bucket;
    if (bucket > 4096) continue;
    const bool flat = c->spec().axis == Axis::flat;
    const auto bucketOf = [&](size_t e) { return flat ? e / bucket : e % bucket; };
    for (size_t n :
         flat ? std::vector<size_t>{1, 17, 513, 2 * bucket + 100} : std::vector<size_t>{bucket, 70 * bucket}) {
      const std::vector<float> good = elements(c->spec(), n);
      EXPECT_EQ(encoded(*plain, good, kDraws), encoded(*c, good, kDraws)) << text;
      for (size_t at : {size_t{0}, size_t{16}, bucket - 1, bucket, size_t{777}, n - 1}) {
        if (at >= n) continue;
        std::vector<float> x = good;
        x[at] = kBad[at % 6];
        const Bytes payload = encoded(*c, x, kDraws);
        for (size_t e = 0; e < n; ++e)
          x[e] = bucketOf(e) == bucketOf(at) ? 0 : x[e];
        const std::vector<float> expected = decoded(*plain, encoded(*plain, x, kDraws), n);
        const std::vector<float> y = decoded(*c, payload, n);
        for (size_t i = 0; i < n; ++i) {
          const bool poisoned = bucketOf(i) == bucketOf(at);
          ASSERT_EQ(floatBits(y[i]), poisoned ? kPoison : floatBits(expected[i])) << text << " " << i << " of " << n;
        }
        expectPoisonedScale(c->spec(), payload, bucketOf(at));
        std::vector<float> sum(n, 1.0f);
        c->decodeAdd(sum.data(), DType::float32, payload, 0, n);
        EXPECT_TRUE(std::isnan(sum[at]));
        EXPECT_THROW(decoded(*plain, payload, n), WireError) << text;
      }
    }
  }
}

TEST_P(Laws, OnlyTheOneNaNIsPoison) {
  for (const char* text : {"minmax4:bucket=64,nonfinite=poison", "sym4:bucket=64,nonfinite=poison"}) {
    const GridCodec c = codec(text);
    const Bytes good = encoded(c, normal(200, 1));
    const size_t step = text[0] == 'm' ? 4 : 0;
    for (uint32_t bits : {0x7f800000u, 0xff800000u, 0xffc00000u, 0x7fc00001u, 0x7fa00000u}) {
      Bytes changed = good;
      std::memcpy(changed.data() + step, &bits, 4);
      EXPECT_THROW(decoded(c, changed, 200), WireError) << text << std::hex << bits;
    }
    Bytes changed = good;
    std::memcpy(changed.data(), &kPoison, 4);  // minmax's step is not 0 next to it
    if (step) {
      EXPECT_THROW(decoded(c, changed, 200), WireError) << text;
    } else {
      EXPECT_NO_THROW(decoded(c, changed, 200)) << text;
    }
  }
}

// Every bit of a good payload's codes that carries nothing is refused when it is flipped; all others are taken. Bytes
// between the metadata and the codes are refused, and metadata that are not finite, and payloads of another size.
TEST_P(Laws, PayloadsThatAreNone) {
  for (const char* text :
       {"minmax3:bucket=64", "qsgd8:bucket=64", "minmax1:bucket=1024", "minmax5:bucket=256", "sym3:bucket=64",
        "mid8:bucket=64", "sign1", "mid5:bucket=256", "minmax4:bucket=64,meta=bf16", "sym4:bucket=64,meta=bf16",
        "minmax3:axis=channel,C=10", "sym4:axis=channel,C=10"}) {
    const auto c = anyCodec(text);
    const bool channels = c->spec().axis == Axis::channel;
    for (size_t n : {10, 18, 530, 600}) {
      if (channels && n % c->spec().bucket != 0) continue;
      const Bytes good = encoded(*c, normal(n, 1));
      const size_t number = c->spec().meta == Meta::bf16 ? 2 : 4;
      const size_t buckets = channels ? c->spec().bucket : (n + c->spec().bucket - 1) / c->spec().bucket;
      const size_t meta = number * (gridFamily(c->spec().id)->centred ? 1 : 2) * buckets, words = up64(meta);
      const auto refuses = [&](const Bytes& payload) {
        std::vector<float> y(n);
        try {
          c->decode(y.data(), DType::float32, payload, 0, n);
          return false;
        } catch (const WireError&) {
          return true;
        }
      };
      uint64_t carrying = 0;
      for (size_t bit = 0; bit < (good.size() - words) * 8; ++bit) {
        Bytes changed = good;
        changed[words + bit / 8] ^= std::byte(1 << bit % 8);
        carrying += !refuses(changed);
      }
      EXPECT_EQ(carrying, n * c->spec().bits) << text << " " << n;
      for (size_t at = meta; at < words; ++at) {
        Bytes changed = good;
        changed[at] = std::byte{1};
        EXPECT_TRUE(refuses(changed)) << text << " " << at;
      }
      for (size_t at = 0; at < meta; at += number) {
        for (uint32_t bits : {floatBits(NAN), floatBits(INFINITY), floatBits(-INFINITY)}) {
          Bytes changed = good;
          bits >>= 32 - 8 * number;
          std::memcpy(changed.data() + at, &bits, number);
          EXPECT_TRUE(refuses(changed)) << text << " " << at;
        }
      }
      for (size_t less : {1, 64})
        EXPECT_TRUE(refuses({good.begin(), good.end() - static_cast<ptrdiff_t>(less)})) << text << " " << less;
    }
  }
}

TEST_P(Laws, CallersMistakes) {
  for (const char* text : {"minmax4:bucket=1024", "fp16", "sym4:axis=channel,C=16", "gauss4", "log9"}) {
    const auto c = anyCodec(text);
    std::vector<float> x(64);
    Bytes payload(c->encodedBytes(64, DType::float32));
    EXPECT_THROW(c->encode(std::span(payload).first(20), x.data(), DType::float32, 0, 64, {}), ValueError) << text;
    EXPECT_THROW(c->encode(payload, x.data(), DType::float32, 100, 64, {}), ValueError) << text;
    EXPECT_EQ(c->encodedBytes(0, DType::float32), 0u);
    if (c->spec().axis == Axis::channel) EXPECT_THROW(c->encodedBytes(65, DType::float32), ValueError);
    for (DType dtype : {DType::float64, DType::int32, DType::opaque, DType::boolean}) {
      const auto encode = [&] { c->encode(payload, x.data(), dtype, 0, 64, {}); };
      EXPECT_TRUE(test::holds(test::thrownBy<TypeError>(encode), {dtypeName(dtype), "float32"})) << text;
    }
  }
}

}  // namespace
}  // namespace lowcomm

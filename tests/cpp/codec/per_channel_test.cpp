// axis=channel, under every kernel form: every channel is what a bucket of its elements would be, except for the codes'
// places.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/narrow_float.h"
#include "codec/nonfinite.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::decoded;
using test::encoded;
using test::normal;

class PerChannel : public testing::TestWithParam<const KernelTable*> {
 protected:
  std::shared_ptr<const Codec> codec(const std::string& text, size_t channels, const std::string& options = "") const {
    return test::codecOf(text + ":axis=channel,C=" + std::to_string(channels) + options, *GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(Forms, PerChannel, testing::ValuesIn(test::allForms()),
                         [](const auto& info) { return std::string(info.param->name); });

// Channels of very different sizes, as activations have them.
std::vector<float> activations(size_t rows, size_t channels, uint32_t seed) {
  std::vector<float> x = normal(rows * channels, seed);
  for (size_t e = 0; e < x.size(); ++e)
    x[e] = x[e] * std::ldexp(1.0f, static_cast<int>(e % channels % 9) - 4) + static_cast<float>(e % channels % 3);
  return x;
}

const size_t kChannels[] = {1, 2, 3, 5, 8, 15, 16, 17, 24, 48, 64, 100, 511, 512, 513, 1024};
const char* const kFamilies[] = {"minmax", "qsgd", "lattice", "sym", "mid"};

TEST_P(PerChannel, FormsAgree) {
  for (size_t channels : kChannels) {
    for (size_t rows : {1, 2, 7, 31, 32, 64, 65, 200}) {
      const std::vector<float> x = activations(rows, channels, static_cast<uint32_t>(rows));
      const auto check = [&](const std::string& name, const std::string& options) {
        const auto c = codec(name, channels, options);
        const auto reference = test::codecOf(c->spec().str(), *scalarKernels());
        const Draws draws{3, 4, 5};
        const Bytes payload = encoded(*c, x, draws);
        ASSERT_EQ(payload, encoded(*reference, x, draws)) << c->spec().str() << " rows " << rows;
        const std::vector<float> y = decoded(*c, payload, x.size()), expected = decoded(*reference, payload, x.size());
        ASSERT_EQ(std::memcmp(y.data(), expected.data(), y.size() * 4), 0) << c->spec().str() << " rows " << rows;
        std::vector<float> sum = x;
        c->decodeAdd(sum.data(), DType::float32, payload, 0, x.size());
        for (size_t i = 0; i < x.size(); ++i)
          ASSERT_EQ(sum[i], x[i] + y[i]);
      };
      const int bits = 2 + static_cast<int>((channels + rows) % 7);
      for (const char* family : kFamilies)
        check(family + std::to_string(bits), "");
      check("minmax1", ",meta=bf16");
      check("sym8", ",meta=bf16,range=l2");
      check("mid3", ",range=l2");
      check("sign1", "");
      if (HasFatalFailure()) return;
    }
  }
}

// With as many elements a channel as the smallest bucket has, a channel's scale and values are those of a bucket that
// holds it. Draws follow an element's place, so only codecs without are compared by value.
TEST_P(PerChannel, AChannelIsABucketOfItsElements) {
  const size_t rows = 64;
  for (size_t channels : kChannels) {
    const std::vector<float> x = activations(rows, channels, 9);
    std::vector<float> turned(x.size());
    for (size_t e = 0; e < x.size(); ++e)
      turned[e % channels * rows + e / channels] = x[e];
    for (const char* text :
         {"minmax4", "minmax8|meta=bf16", "sym3", "sym2|range=l2", "mid4", "sign1", "sign1|meta=bf16", "minmax1"}) {
      const std::string whole = text, name = whole.substr(0, whole.find('|'));
      const std::string options = name.size() == whole.size() ? "" : "," + whole.substr(name.size() + 1);
      const auto c = codec(name, channels, options);
      const auto flat = test::codecOf(name + ":bucket=64" + options, *scalarKernels());
      const Bytes payload = encoded(*c, x), other = encoded(*flat, turned);
      ASSERT_EQ(payload.size(), other.size());
      const size_t meta =
          channels * (gridFamily(c->spec().id)->centred ? 4 : 8) / (options.starts_with(",meta") ? 2 : 1);
      ASSERT_EQ(std::memcmp(payload.data(), other.data(), meta), 0) << c->spec().str();
      const std::vector<float> y = decoded(*c, payload, x.size()), expected = decoded(*flat, other, x.size());
      for (size_t e = 0; e < x.size(); ++e)
        ASSERT_EQ(y[e], expected[e % channels * rows + e / channels]) << c->spec().str() << " element " << e;
    }
  }
}

// The shift of a channel is that of the bucket with its number; the byte of an element that of its place.
TEST_P(PerChannel, DrawsAreThoseOfThePlaceAndOfTheChannel) {
  const size_t channels = 16, rows = 64;
  const std::vector<float> x = activations(rows, channels, 3);
  std::vector<float> turned(x.size());
  for (size_t e = 0; e < x.size(); ++e)
    turned[e % channels * rows + e / channels] = x[e];
  const auto c = codec("lattice4", channels), flat = test::codecOf("lattice4:bucket=64", *scalarKernels());
  const Bytes payload = encoded(*c, x, {1, 2, 3}), other = encoded(*flat, turned, {1, 2, 3});
  EXPECT_EQ(std::memcmp(payload.data(), other.data(), channels * 8), 0);
  const std::vector<float> y = decoded(*c, payload, x.size()), expected = decoded(*flat, other, x.size());
  for (size_t e = 0; e < x.size(); ++e)
    ASSERT_EQ(y[e], expected[e % channels * rows + e / channels]);
  // One range for all channels: qsgd's codes are those of one bucket for the tensor.
  std::vector<float> same = normal(rows * channels, 4);
  for (float& v : same)
    v = std::clamp(v, -1.0f, 1.0f);
  std::fill_n(same.begin(), channels, -1.0f);
  std::fill_n(same.begin() + channels, channels, 1.0f);
  const auto by_channel = codec("qsgd4", channels), whole = test::codecOf("qsgd4:bucket=tensor", *GetParam());
  EXPECT_EQ(decoded(*by_channel, encoded(*by_channel, same, {1, 2, 3}), same.size()),
            decoded(*whole, encoded(*whole, same, {1, 2, 3}), same.size()));
}

TEST_P(PerChannel, HalfElementsAreConvertedFirst) {
  for (size_t channels : {16, 100}) {
    std::vector<float> x = activations(77, channels, 1);
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      std::vector<uint16_t> half(x.size()), back(x.size());
      for (size_t i = 0; i < x.size(); ++i) {
        half[i] = dtype == DType::float16 ? floatToFloat16(x[i]) : floatToBfloat16(x[i]);
        x[i] = dtype == DType::float16 ? float16ToFloat(half[i]) : bfloat16ToFloat(half[i]);
      }
      for (const char* name : {"qsgd4", "sym8"}) {
        const auto c = codec(name, channels);
        const Bytes payload = encoded(*c, half, {1, 2, 3}, 0, dtype);
        ASSERT_EQ(payload, encoded(*c, x, {1, 2, 3}));
        const std::vector<float> y = decoded(*c, payload, x.size());
        c->decode(back.data(), dtype, payload, 0, x.size());
        for (size_t i = 0; i < x.size(); ++i)
          ASSERT_EQ(back[i], dtype == DType::float16 ? floatToFloat16(y[i]) : floatToBfloat16(y[i]));
      }
    }
  }
}

TEST_P(PerChannel, WhatIsNotFinite) {
  const size_t channels = 24, rows = 70;
  for (const char* name : {"minmax4", "qsgd3", "lattice4", "sym4", "sign1"}) {
    for (float bad : {NAN, INFINITY, -INFINITY, 0x1p126f}) {
      for (size_t at : {size_t{0}, size_t{23}, size_t{24}, size_t{777}, rows * channels - 1}) {
        std::vector<float> x = activations(rows, channels, 2);
        x[at] = bad;
        try {
          encoded(*codec(name, channels), x);
          ADD_FAILURE() << name << " took " << bad;
        } catch (const NonFiniteError& error) {
          EXPECT_EQ(error.position, at);
        }
        std::vector<float> blank = x;
        for (size_t e = at % channels; e < x.size(); e += channels)
          blank[e] = 0;
        const Draws draws{1, 2, 3};
        const auto poison = codec(name, channels, ",nonfinite=poison");
        const Bytes payload = encoded(*poison, x, draws);
        const std::vector<float> y = decoded(*poison, payload, x.size());
        const std::vector<float> others = decoded(*poison, encoded(*codec(name, channels), blank, draws), x.size());
        for (size_t e = 0; e < x.size(); ++e)
          ASSERT_EQ(floatBits(y[e]), e % channels == at % channels ? 0x7fc00000u : floatBits(others[e])) << name;
        EXPECT_THROW(decoded(*codec(name, channels), payload, x.size()), WireError);
      }
    }
  }
}

TEST_P(PerChannel, PayloadsThatAreNone) {
  for (const char* name : {"minmax3", "sym4"}) {
    const size_t channels = 10, rows = 55, n = channels * rows;
    const auto c = codec(name, channels);
    const Bytes good = encoded(*c, activations(rows, channels, 1));
    const size_t meta = channels * (name[0] == 'm' ? 8 : 4), words = up64(meta);
    std::vector<float> y(n);
    uint64_t carrying = 0;
    for (size_t bit = 0; bit < (good.size() - words) * 8; ++bit) {
      Bytes changed = good;
      changed[words + bit / 8] ^= std::byte(1 << bit % 8);
      try {
        c->decode(y.data(), DType::float32, changed, 0, n);
        ++carrying;
      } catch (const WireError&) {
      }
    }
    EXPECT_EQ(carrying, n * c->spec().bits);
    for (size_t at = meta; at < words; ++at) {
      Bytes changed = good;
      changed[at] = std::byte{1};
      EXPECT_THROW(c->decode(y.data(), DType::float32, changed, 0, n), WireError);
    }
    const float infinite = INFINITY;
    for (size_t at = 0; at < meta; at += 4) {
      Bytes changed = good;
      std::memcpy(changed.data() + at, &infinite, 4);
      EXPECT_THROW(c->decode(y.data(), DType::float32, changed, 0, n), WireError);
    }
    EXPECT_THROW(c->decode(y.data(), DType::float32, std::span(good).first(good.size() - 64), 0, n), WireError);
  }
}

TEST_P(PerChannel, CallersMistakes) {
  const auto c = codec("sym4", 16);
  std::vector<float> x(64);
  Bytes payload(c->encodedBytes(64, DType::float32));
  EXPECT_EQ(c->encodedBytes(0, DType::float32), 0u);
  EXPECT_THROW(c->encodedBytes(65, DType::float32), ValueError);
  EXPECT_THROW(c->encode(payload, x.data(), DType::float32, 512, 64, {}), ValueError);
  EXPECT_THROW(c->encode(payload, x.data(), DType::float64, 0, 64, {}), TypeError);
  EXPECT_THROW(c->encode(std::span(payload).first(64), x.data(), DType::float32, 0, 64, {}), ValueError);
}

}  // namespace
}  // namespace lowcomm

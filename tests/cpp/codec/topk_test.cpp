// topk, under every kernel form: against a sort, and against bytes that are no payload.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/narrow_float.h"
#include "codec/nonfinite.h"
#include "codec/topk.h"
#include "grid_cases.h"
#include "kernels/select/select.h"

namespace lowcomm {
namespace {

using namespace test;

class Topk : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Forms, Topk, testing::ValuesIn(test::allForms()), test::formName);

// Numbers of the k elements that are sent, ascending.
std::vector<size_t> chosen(const std::vector<float>& x, size_t k) {
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return (floatBits(x[a]) & 0x7fffffffu) > (floatBits(x[b]) & 0x7fffffffu);
  });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

void expectSelected(const KernelTable& form, const std::vector<float>& x, size_t k) {
  std::vector<uint64_t> bitmap(bitmapWords(x.size()), ~uint64_t{0});
  std::vector<float> values(k + kSlack);
  selectLargest(bitmap.data(), values.data(), x.data(), x.size(), k, *form.select);
  std::vector<uint64_t> expected(bitmap.size());
  const std::vector<size_t> order = chosen(x, k);
  for (size_t i = 0; i < k; ++i) {
    expected[order[i] / 64] |= uint64_t{1} << order[i] % 64;
    ASSERT_EQ(floatBits(values[i]), floatBits(x[order[i]])) << i << " of " << k << " of " << x.size();
  }
  ASSERT_EQ(bitmap, expected) << k << " of " << x.size();
  if (x.size() > 65536) return;
  std::vector<uint16_t> places(x.size() + kSlack);
  std::vector<uint32_t> scratch(x.size() + kSlack);
  form.select->largest(places.data(), scratch.data(), x.data(), x.size(), k);
  ASSERT_TRUE(std::equal(order.begin(), order.end(), places.begin())) << k << " of " << x.size();
}

TEST_P(Topk, SelectsWhatASortDoes) {
  for (size_t n : {1, 15, 16, 17, 63, 64, 65, 127, 511, 512, 513, 1000, 65535, 65536, 65537, 200001}) {
    for (size_t k : {size_t{1}, (n + 99) / 100, (n + 4) / 5, n / 2 + 1, n - n / 7, n}) {
      if (k == 0 || k > n) continue;
      expectSelected(*GetParam(), normal(n, static_cast<uint32_t>(n + k)), k);
      // Ties in plenty: few different magnitudes, or one.
      std::vector<float> x = normal(n, 5);
      for (float& v : x)
        v = std::round(v * 2) / 2;
      expectSelected(*GetParam(), x, k);
      expectSelected(*GetParam(), std::vector<float>(n, -3.5f), k);
      expectSelected(*GetParam(), std::vector<float>(n, 0.0f), k);
      for (size_t i = 0; i < n; ++i)
        x[i] = i % 3 ? 0.0f : -0.0f;
      expectSelected(*GetParam(), x, k);
    }
  }
}

// Magnitudes that differ in their last bits only, or in nothing but the exponent, down to the least subnormal.
TEST_P(Topk, SelectsByEveryBit) {
  std::mt19937 generator(1);
  std::vector<float> close(5000), wide(5000);
  for (size_t i = 0; i < close.size(); ++i) {
    close[i] = floatOf(0x3f800000u + generator() % 700);
    wide[i] = floatOf(generator() % 0x7e800000u | (generator() & 0x80000000u));
  }
  std::vector<float> subnormal(5000);
  for (float& v : subnormal)
    v = floatOf(generator() % 3000);
  for (size_t k : {1, 2, 49, 1000, 2500, 4999, 5000}) {
    expectSelected(*GetParam(), close, k);
    expectSelected(*GetParam(), wide, k);
    expectSelected(*GetParam(), subnormal, k);
    expectSelected(*GetParam(), std::vector<float>(5000, floatOf(0xffffffffu)), k);
  }
}

size_t kOf(double keep, size_t n) {
  return std::max<size_t>(1, static_cast<size_t>(std::floor(keep * static_cast<double>(n) + 0.5)));
}

// Numbers of the elements that the codec sends, ascending.
std::vector<size_t> sentOf(const CodecSpec& spec, const std::vector<float>& x) {
  if (spec.bucket == 0) return chosen(x, kOf(spec.keep, x.size()));
  const size_t spacing = spec.bucket / static_cast<size_t>(spec.keep);
  std::vector<size_t> sent;
  for (size_t at = 0; at < x.size(); at += spec.bucket) {
    const std::vector<float> chunk(x.begin() + at, x.begin() + std::min(x.size(), at + spec.bucket));
    for (size_t place : chosen(chunk, (chunk.size() + spacing - 1) / spacing))
      sent.push_back(at + place);
  }
  return sent;
}

TEST_P(Topk, DecodesToTheValuesInTheirPlaces) {
  for (const char* text : {"topk", "topk:keep=0.01,values=qsgd4", "topk:keep=0.001,values=minmax8",
                           "topk:keep=0.5,values=sign1", "topk:keep=1,values=sym4", "topk:chunk=64,keep=8,values=sym2",
                           "topk:chunk=4096,keep=64,values=qsgd3", "topk:chunk=65536,keep=32768,values=lattice8"}) {
    const auto c = anyCodec(text);
    const auto reference = test::codecOf(text, *scalarKernels());
    for (size_t n : {0, 1, 2, 3, 15, 17, 512, 513, 5000, 65536, 65537, 200001}) {
      const std::vector<float> x = normal(n, static_cast<uint32_t>(n));
      const Draws draws{4, 5, 6};
      const Bytes payload = encoded(*c, x, draws);
      ASSERT_EQ(payload, encoded(*reference, x, draws)) << text << " " << n;
      if (n == 0) continue;
      // The values are a tensor of their own under their codec.
      const std::vector<size_t> order = sentOf(c->spec(), x);
      const size_t k = order.size();
      std::vector<float> values(k), expected(n, 0.0f);
      for (size_t i = 0; i < k; ++i)
        values[i] = x[order[i]];
      const auto inner = makeCodec(valueSpec(c->spec()), *GetParam());
      const std::vector<float> sent = decoded(*inner, encoded(*inner, values, draws), k);
      for (size_t i = 0; i < k; ++i)
        expected[order[i]] = sent[i];
      const std::vector<float> y = decoded(*c, payload, n);
      ASSERT_EQ(y, expected) << text << " " << n;

      const size_t places = std::min((n + 7) / 8, 4 * ((n + 65535) / 65536) + 2 * k);
      if (c->spec().bucket == 0)
        ASSERT_EQ(payload.size(), (16 + places + 63) / 64 * 64 + inner->encodedBytes(k, DType::float32));
      std::vector<float> sum(n, 1.5f);
      c->decodeAdd(sum.data(), DType::float32, payload, 0, n);
      for (size_t i = 0; i < n; ++i)
        ASSERT_EQ(sum[i], 1.5f + y[i]);
    }
  }
}

TEST_P(Topk, WhatIsNotFinite) {
  for (float bad : {NAN, INFINITY, -0x1p126f}) {
    std::vector<float> x = normal(5000, 1);
    x[4321] = bad;
    try {
      encoded(*anyCodec("topk:keep=0.01"), x);
      ADD_FAILURE() << bad;
    } catch (const NonFiniteError& error) {
      EXPECT_EQ(error.position, 4321u);
      EXPECT_EQ(error.codec, "topk:keep=0.01,values=sym8");
    }
    const auto poison = anyCodec("topk:keep=0.01,nonfinite=poison");
    const std::vector<float> y = decoded(*poison, encoded(*poison, x), x.size());
    EXPECT_TRUE(std::isnan(y[4321]));
  }
}

// Every bit but those of the values' codes and scales is decided: changing it is an error, or a set of places as good.
TEST_P(Topk, PayloadsThatAreNone) {
  for (const auto& [text, n] : {std::pair("topk:keep=0.3,values=sym4", 100), {"topk:keep=0.02,values=sym4", 400}}) {
    const auto c = anyCodec(text);
    const Bytes good = encoded(*c, normal(n, 1));
    const size_t k = kOf(c->spec().keep, n), places = placesBytes(n, k), values = up64(16 + places);
    EXPECT_EQ(good[10], std::byte{placesListed(n, k)});
    std::vector<float> y(n);
    for (size_t bit = 0; bit < values * 8; ++bit) {
      Bytes changed = good;
      changed[bit / 8] ^= std::byte(1 << bit % 8);
      const bool place = bit / 8 >= 20 && bit / 8 < 16 + places && placesListed(n, k);
      if (place) {  // another ascending place may come of it
        try {
          c->decode(y.data(), DType::float32, changed, 0, n);
        } catch (const WireError&) {
        }
      } else {
        EXPECT_THROW(c->decode(y.data(), DType::float32, changed, 0, n), WireError) << text << " bit " << bit;
      }
    }
    for (size_t size = 0; size < good.size(); size += 7)
      EXPECT_THROW(c->decode(y.data(), DType::float32, std::span(good).first(size), 0, n), WireError);
    EXPECT_THROW(c->decode(y.data(), DType::float32, good, 512, n), ValueError);
  }
  const auto listed = [&](std::vector<uint16_t> places, uint32_t count) {
    Bytes payload = encoded(*anyCodec("topk:keep=0.005,values=sym4"), normal(600, 1));
    std::memcpy(payload.data() + 16, &count, 4);
    std::memcpy(payload.data() + 20, places.data(), places.size() * 2);
    std::vector<float> y(600);
    anyCodec("topk:keep=0.005,values=sym4")->decodeAdd(y.data(), DType::float32, payload, 0, 600);
  };
  EXPECT_NO_THROW(listed({0, 1, 599}, 3));
  EXPECT_THROW(listed({0, 1, 600}, 3), WireError);
  EXPECT_THROW(listed({0, 1, 65535}, 3), WireError);
  EXPECT_THROW(listed({1, 1, 599}, 3), WireError);
  EXPECT_THROW(listed({5, 4, 599}, 3), WireError);
  EXPECT_THROW(listed({0, 1, 599}, 2), WireError);
  EXPECT_THROW(listed({0, 1, 599}, 4), WireError);
  EXPECT_THROW(listed({0, 1, 599}, 0xffffffffu), WireError);
}

TEST(Places, TheSmallerFormByNumbersAlone) {
  EXPECT_FALSE(placesListed(64, 2));  // 8 bytes either way
  EXPECT_TRUE(placesListed(64, 1));   // 6 against 8
  EXPECT_FALSE(placesListed(1000, 61));
  EXPECT_TRUE(placesListed(1000, 60));
  EXPECT_EQ(placesBytes(1000, 60), 124u);
  EXPECT_EQ(placesBytes(1000, 61), 125u);
}

// A block of 65,536 elements that are all sent: the count needs more than 16 bits.
TEST(Places, AWholeBlockInAList) {
  const uint64_t n = 65536 * 20 + 5, k = 65536 + 1;
  ASSERT_TRUE(placesListed(n, k));
  std::vector<uint64_t> bitmap(bitmapWords(n)), back(bitmapWords(n));
  std::fill(bitmap.begin() + 1024, bitmap.begin() + 2048, ~uint64_t{0});
  bitmap.back() = 16;
  Bytes bytes(placesBytes(n, k));
  writePlaces(bytes, bitmap.data(), n, k);
  readPlaces(back.data(), bytes, n, k, "places");
  EXPECT_EQ(bitmap, back);
  EXPECT_THROW(readPlaces(back.data(), bytes, n - 1, k, "places"), WireError);
}

}  // namespace
}  // namespace lowcomm

// axis=channel, under every kernel form: every channel is what a bucket of its elements would be, except for the codes'
// places.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/narrow_float.h"
#include "codec/grid_laws.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using namespace test;

class PerChannel : public test::EveryForm {
 protected:
  std::shared_ptr<const Codec> codec(const std::string& text, size_t channels, const std::string& options = "") const {
    return test::codecOf(text + ":axis=channel,C=" + std::to_string(channels) + options, *GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(Forms, PerChannel, testing::ValuesIn(test::allForms()), test::formName);

const size_t kChannels[] = {1, 2, 3, 5, 8, 15, 16, 17, 24, 48, 64, 100, 511, 512, 513, 1024};

// With as many elements a channel as the smallest bucket has, a channel's scale and values are those of a bucket that
// holds it. Draws follow an element's place, so only codecs without are compared by value.
TEST_P(PerChannel, AChannelIsABucketOfItsElements) {
  const size_t rows = 64;
  for (size_t channels : kChannels) {
    const std::vector<float> x = test::spread(normal(rows * channels, 9), channels);
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
  const std::vector<float> x = test::spread(normal(rows * channels, 3), channels);
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

}  // namespace
}  // namespace lowcomm

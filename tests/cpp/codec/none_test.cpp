#include "codec/float_codec.h"

#include <gtest/gtest.h>

#include "collective_cases.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

TEST(None, CarriesEveryTypeAndPadsWithZeros) {
  const auto none = makeCodec(CodecSpec{});
  EXPECT_EQ(none->spec().str(), "none");
  for (DType dtype : test::kAllTypes) {
    for (size_t n : {0, 1, 63, 64, 65, 1000}) {
      std::vector<unsigned char> x(n * itemBytes(dtype)), y(x.size());
      for (size_t i = 0; i < x.size(); ++i)
        x[i] = static_cast<unsigned char>(i * 7 + 1);
      test::Bytes payload(none->encodedBytes(n, dtype), std::byte{0xff});
      EXPECT_EQ(payload.size(), (x.size() + 63) / 64 * 64);
      none->encode(payload, x.data(), dtype, 0, n, {});
      none->decode(y.data(), dtype, payload, 0, n);
      EXPECT_EQ(x, y);
      for (size_t at = x.size(); at < payload.size(); ++at) {
        test::Bytes changed = payload;
        changed[at] = std::byte{1};
        EXPECT_THROW(none->decode(y.data(), dtype, changed, 0, n), WireError);
      }
      payload.push_back(std::byte{0});
      EXPECT_THROW(none->decode(y.data(), dtype, payload, 0, n), WireError);
      EXPECT_THROW(none->encode(payload, x.data(), dtype, 0, n, {}), ValueError);
    }
  }
  EXPECT_FALSE(none->supports(static_cast<DType>(77)));
}

TEST(None, ElementsAreReadWhereTheyStand) {
  const NoneCodec none({});
  const std::vector<int16_t> x = {1, -2, 3};
  test::Bytes payload = test::encoded(none, x, {}, 0, DType::int16);
  const auto elements = NoneCodec::elements(DType::int16, payload, 3);
  EXPECT_EQ(elements.data(), payload.data());
  EXPECT_EQ(elements.size(), 6u);
  EXPECT_TRUE(NoneCodec::elements(DType::int16, {}, 0).empty());
  EXPECT_THROW(NoneCodec::elements(DType::int16, payload, 33), WireError);
  EXPECT_THROW(NoneCodec::elements(static_cast<DType>(77), payload, 3), TypeError);
  payload[6] = std::byte{1};
  EXPECT_THROW(NoneCodec::elements(DType::int16, payload, 3), WireError);
  float sum = 0;
  EXPECT_THROW(none.decodeAdd(&sum, DType::float32, payload, 0, 1), TypeError);
}

TEST(Dispatch, ChoiceByName) {
  EXPECT_STREQ(chooseKernels("scalar").name, "scalar");
  EXPECT_EQ(&chooseKernels(nullptr), test::allForms().back());
  EXPECT_EQ(&chooseKernels(""), test::allForms().back());
  for (const KernelTable* form : test::allForms())
    EXPECT_EQ(&chooseKernels(form->name), form);
#if defined(__aarch64__)
  EXPECT_STREQ(chooseKernels(nullptr).name, "neon");  // every one has it
#endif
  for (const char* name : {"avx1024", "AVX2", "fast"}) {
    const std::string what = test::thrownBy<ValueError>([&] { chooseKernels(name); });
    EXPECT_TRUE(test::holds(what, {"LOWCOMM_KERNELS", "scalar", name}));
  }
}

}  // namespace
}  // namespace lowcomm

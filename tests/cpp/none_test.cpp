#include "codec/none.h"

#include <gtest/gtest.h>

#include "codec/dispatch.h"
#include "grid_cases.h"
#include "kernels/half.h"

namespace lowcomm {
namespace {

const DType kAll[] = {DType::opaque, DType::float32, DType::float16, DType::bfloat16, DType::float64, DType::int8,
                      DType::uint8,  DType::int16,   DType::int32,   DType::int64,    DType::boolean};

TEST(None, CarriesEveryTypeAndPadsWithZeros) {
  const auto none = makeCodec({});
  EXPECT_EQ(none->spec().str(), "none");
  for (DType dtype : kAll) {
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

template <typename T>
void expectSum(DType dtype) {
  const NoneCodec none({});
  const std::vector<T> x = {T(1), T(0), T(3), T(5)};
  std::vector<float> acc = {0.5f, 0.25f, -1, 2};
  none.decodeAdd(acc.data(), dtype, test::encoded(none, x, {}, 0, dtype), 0, 4);
  EXPECT_EQ(acc, (std::vector<float>{1.5f, 0.25f, 2, 7})) << dtypeName(dtype);
}

TEST(None, AddsInFloat) {
  expectSum<float>(DType::float32);
  expectSum<double>(DType::float64);
  expectSum<int8_t>(DType::int8);
  expectSum<uint8_t>(DType::uint8);
  expectSum<int16_t>(DType::int16);
  expectSum<int32_t>(DType::int32);
  expectSum<int64_t>(DType::int64);
  const NoneCodec none({});
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    std::vector<uint16_t> x(1300);
    std::vector<float> acc(x.size(), 1), expected(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const float value = static_cast<float>(i) / 8;
      x[i] = dtype == DType::float16 ? floatToFloat16(value) : floatToBfloat16(value);
      expected[i] = 1 + (dtype == DType::float16 ? float16ToFloat(x[i]) : bfloat16ToFloat(x[i]));
    }
    none.decodeAdd(acc.data(), dtype, test::encoded(none, x, {}, 0, dtype), 0, x.size());
    EXPECT_EQ(acc, expected);
  }
  std::vector<float> acc(1);
  EXPECT_THROW(none.decodeAdd(acc.data(), DType::opaque, test::Bytes(64), 0, 1), TypeError);
}

TEST(Dispatch, ChoiceByName) {
  EXPECT_STREQ(chooseKernels("scalar").name, "scalar");
  EXPECT_EQ(&chooseKernels(nullptr), test::allForms().back());
  EXPECT_EQ(&chooseKernels(""), test::allForms().back());
  for (const KernelTable* form : test::allForms())
    EXPECT_EQ(&chooseKernels(form->name), form);
  for (const char* name : {"avx512", "AVX2", "fast"}) {
    try {
      chooseKernels(name);
      ADD_FAILURE() << name;
    } catch (const ValueError& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("LOWCOMM_KERNELS"), std::string::npos) << what;
      EXPECT_NE(what.find("scalar"), std::string::npos) << what;
      EXPECT_NE(what.find(name), std::string::npos) << what;
    }
  }
}

}  // namespace
}  // namespace lowcomm

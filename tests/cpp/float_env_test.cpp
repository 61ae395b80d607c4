#include "kernels/float_env.h"

#include <gtest/gtest.h>

#include <cstring>

#include "grid_cases.h"

#if defined(__x86_64__)

namespace lowcomm {
namespace {

constexpr unsigned kHostile = 0x1f80 | 0x8040 | 0x6000;  // flush to zero, denormals are zero, round toward zero

class Hostile {
 public:
  Hostile() { _mm_setcsr(kHostile); }
  ~Hostile() { _mm_setcsr(saved_); }

 private:
  unsigned saved_ = _mm_getcsr();
};

TEST(FloatEnv, RestoresTheCallersRegister) {
  Hostile hostile;
  {
    FloatEnv env;
    EXPECT_EQ(_mm_getcsr() & 0xffc0u, 0x1f80u);
  }
  EXPECT_EQ(_mm_getcsr() & 0xffc0u, kHostile & 0xffc0u);
}

TEST(FloatEnv, CodecsIgnoreTheCallersRegister) {
  for (const KernelTable* form : test::allForms()) {
    for (const char* text : {"minmax4:bucket=64", "qsgd8:bucket=1024"}) {
      const GridCodec codec = test::gridCodec(text, *form);
      // Subnormals among the values, and a range whose step is subnormal.
      std::vector<float> x = test::normal(3000, 1, 1e-37f);
      for (size_t i = 0; i < 64; ++i)
        x[i] = 0x1p-130f * static_cast<float>(i);
      for (DType dtype : {DType::float32, DType::float16}) {
        std::vector<uint16_t> half(x.size());
        for (size_t i = 0; i < x.size(); ++i)
          half[i] = static_cast<uint16_t>(i);  // subnormal halves first
        const void* source = dtype == DType::float32 ? static_cast<const void*>(x.data()) : half.data();
        test::Bytes plain(codec.encodedBytes(x.size(), dtype)), hostile(plain.size());
        std::vector<float> y(x.size()), z(x.size()), sum(x.size(), 0x1p-140f), sum2(sum);
        codec.encode(plain, source, dtype, 0, x.size(), {1, 2, 3});
        codec.decode(y.data(), dtype, plain, 0, x.size());
        codec.decodeAdd(sum.data(), dtype, plain, 0, x.size());
        {
          Hostile set;
          codec.encode(hostile, source, dtype, 0, x.size(), {1, 2, 3});
          codec.decode(z.data(), dtype, plain, 0, x.size());
          codec.decodeAdd(sum2.data(), dtype, plain, 0, x.size());
        }
        EXPECT_EQ(plain, hostile) << form->name << " " << text;
        EXPECT_EQ(std::memcmp(y.data(), z.data(), x.size() * itemBytes(dtype)), 0);
        EXPECT_EQ(std::memcmp(sum.data(), sum2.data(), x.size() * 4), 0);
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm

#endif

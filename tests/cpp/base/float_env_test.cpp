#include "base/float_env.h"

#include <gtest/gtest.h>

#include <cstring>

#include "grid_cases.h"

#if defined(__x86_64__) || defined(__aarch64__)

namespace lowcomm {
namespace {

#if defined(__x86_64__)
constexpr uint64_t kHostile = 0x1f80 | 0x8040 | 0x6000;  // flush to zero, denormals are zero, round toward zero
constexpr uint64_t kDefault = 0x1f80;
constexpr uint64_t kFlags = 0x3f;  // sticky, of the same register
uint64_t control() {
  return _mm_getcsr() & ~kFlags;
}
void setControl(uint64_t value) {
  _mm_setcsr(static_cast<unsigned>(value));
}
uint64_t flags() {
  return _mm_getcsr() & kFlags;
}
void setFlags(uint64_t value) {
  _mm_setcsr(static_cast<unsigned>(control() | value));
}
#else
constexpr uint64_t kHostile = 1u << 25 | 1u << 24 | 3u << 22;  // default NaN, flush to zero, round toward zero
constexpr uint64_t kDefault = 0;
uint64_t control() {
  uint64_t value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void setControl(uint64_t value) {
  asm volatile("msr fpcr, %0" ::"r"(value));
}
uint64_t flags() {
  uint64_t value;
  asm volatile("mrs %0, fpsr" : "=r"(value));
  return value & 0x1f;
}
void setFlags(uint64_t value) {
  asm volatile("msr fpsr, %0" ::"r"(value));
}
#endif

class Hostile {
 public:
  Hostile() { setControl(kHostile); }
  ~Hostile() { setControl(saved_); }

 private:
  uint64_t saved_ = control();
};

TEST(FloatEnv, RestoresTheCallersRegister) {
  Hostile hostile;
  setFlags(2);
  {
    FloatEnv env;
    EXPECT_EQ(control(), kDefault);
    setFlags(4);
  }
  EXPECT_EQ(control(), kHostile);
  EXPECT_EQ(flags(), 2u);
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

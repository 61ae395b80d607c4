// The reference of the casts, to be read next to FORMAT.md "Casts"; a machine without a vector form runs it.
#include "kernels/cast/cast.h"

#include <cstring>

#include "base/narrow_float.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

// Codes between memory and numbers.
uint16_t get(Code16 code) {
  uint16_t number;
  std::memcpy(&number, &code, sizeof(code));
  return number;
}
void put(Code16& to, uint16_t number) {
  std::memcpy(&to, &number, sizeof(to));
}

template <auto kConvert, typename To, typename From>
void convertAll(To* y, const From* x, size_t count) {
  for (size_t i = 0; i < count; ++i)
    y[i] = kConvert(x[i]);
}

template <auto kConvert>
bool narrowAll(Code16* y, const float* x, size_t count, float largest) {
  bool finite = true;
  for (size_t i = 0; i < count; ++i) {
    finite &= !isSpecial(x[i]);
    put(y[i], kConvert(heldTo(x[i], largest)));
  }
  return finite;
}

bool toFloat16(Code16* y, const float* x, size_t count) {
  return narrowAll<floatToFloat16>(y, x, count, kFloat16Largest);
}
bool toBfloat16(Code16* y, const float* x, size_t count) {
  return narrowAll<floatToBfloat16>(y, x, count, kBfloat16Largest);
}

template <auto kConvert, bool kAdd>
bool widenAll(float* y, const Code16* x, size_t count) {
  bool finite = true;
  for (size_t i = 0; i < count; ++i) {
    const float value = kConvert(get(x[i]));
    finite &= !isSpecial(value);
    y[i] = kAdd ? y[i] + value : value;
  }
  return finite;
}

bool copy(Code16* y, const Code16* x, size_t count, uint16_t infinity) {
  bool finite = true;
  for (size_t i = 0; i < count; ++i) {
    finite &= (get(x[i]) & infinity) != infinity;
    y[i] = x[i];
  }
  return finite;
}

}  // namespace

namespace scalar {

void halvesToFloats(float* y, const uint16_t* x, size_t count) {
  convertAll<float16ToFloat>(y, x, count);
}
void floatsToHalves(uint16_t* y, const float* x, size_t count) {
  convertAll<floatToFloat16>(y, x, count);
}
void brainsToFloats(float* y, const uint16_t* x, size_t count) {
  convertAll<bfloat16ToFloat>(y, x, count);
}
void floatsToBrains(uint16_t* y, const float* x, size_t count) {
  convertAll<floatToBfloat16>(y, x, count);
}

constexpr CastKernels kCasts = {toFloat16,
                                toBfloat16,
                                widenAll<float16ToFloat, false>,
                                widenAll<bfloat16ToFloat, false>,
                                widenAll<float16ToFloat, true>,
                                widenAll<bfloat16ToFloat, true>,
                                copy};

}  // namespace scalar
}  // namespace lowcomm

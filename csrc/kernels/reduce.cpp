#include "kernels/reduce.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/narrow_float.h"

namespace lowcomm {
namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float widen(Float16 v) {
  return float16ToFloat(v.bits);
}
inline float widen(BFloat16 v) {
  return bfloat16ToFloat(v.bits);
}
template <class T>
inline T widen(T v) {
  return v;
}

template <class T, class A>
inline T narrow(A v) {
  if constexpr (std::is_same_v<T, Float16>) {
    return {floatToFloat16(v)};
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return {floatToBfloat16(v)};
  } else {
    return static_cast<T>(v);
  }
}

template <class T>
using Accumulator = decltype(widen(T{}));

// Calls f with a value of the element type; false for a type that is only carried.
template <class F>
bool dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::float32:
      return f(float{}), true;
    case DType::float64:
      return f(double{}), true;
    case DType::float16:
      return f(Float16{}), true;
    case DType::bfloat16:
      return f(BFloat16{}), true;
    case DType::int8:
      return f(int8_t{}), true;
    case DType::uint8:
    case DType::boolean:  // as gloo does
      return f(uint8_t{}), true;
    case DType::int32:
      return f(int32_t{}), true;
    case DType::int64:
      return f(int64_t{}), true;
    default:
      return false;
  }
}

// Signed overflow wraps, as the machine's and gloo's does, instead of being undefined.
template <class A>
A wrappingAdd(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

template <class A>
A wrappingMultiply(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

// For two NaN, or for an infinity minus another, each kind of hardware makes a different NaN: they all become the same
// one.
template <class A>
A settled(A v) {
  if constexpr (std::is_floating_point_v<A>) {
    return v == v ? v : std::numeric_limits<A>::quiet_NaN();
  } else {
    return v;
  }
}

// The element of a sum: rounded, then divided, if by anything.
template <class T>
T finished(Accumulator<T> v, int average_over) {
  using A = Accumulator<T>;
  // Integers divide in 64 bits: the number of ranks need not fit the element type.
  using D = std::conditional_t<std::is_integral_v<A>, int64_t, A>;
  if (average_over > 0) v = static_cast<A>(static_cast<D>(widen(narrow<T>(v))) / static_cast<D>(average_over));
  return narrow<T>(settled(v));
}

// Calls f with the operation on two accumulators; bits of floating types are refused before (reduceSupports).
template <class A, class F>
void withOperation(ReduceKind kind, F&& f) {
  switch (kind) {
    case ReduceKind::sum:
      return f([](A a, A b) { return wrappingAdd(a, b); });
    case ReduceKind::product:
      return f([](A a, A b) { return wrappingMultiply(a, b); });
    case ReduceKind::min:
      return f([](A a, A b) { return std::min(a, b); });
    case ReduceKind::max:
      return f([](A a, A b) { return std::max(a, b); });
    default:
      break;
  }
  if constexpr (std::is_integral_v<A>) {
    if (kind == ReduceKind::bit_and) f([](A a, A b) { return a & b; });
    if (kind == ReduceKind::bit_or) f([](A a, A b) { return a | b; });
    if (kind == ReduceKind::bit_xor) f([](A a, A b) { return a ^ b; });
  }
}

}  // namespace

const char* reduceName(ReduceKind kind) {
  static constexpr const char* kNames[] = {"sum", "product", "min", "max", "band", "bor", "bxor"};
  return kNames[static_cast<int>(kind)];
}

bool reduceSupports(DType dtype, ReduceKind kind) {
  const bool known = dispatch(dtype, [](auto) {});
  const bool floating =
      dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16 || dtype == DType::bfloat16;
  return known && !(floating && kind >= ReduceKind::bit_and);
}

bool reduceCommutes(ReduceKind kind) {
  return kind == ReduceKind::sum || kind == ReduceKind::product;
}

DType accumulatorType(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 ? DType::float32 : dtype;
}

void reduceAssign(void* acc, const void* x, DType dtype, uint64_t n) {
  dispatch(dtype, [&](auto t) {
    using T = decltype(t);
    using A = Accumulator<T>;
    if constexpr (std::is_same_v<A, T>) {
      if (acc != x && n > 0) std::memmove(acc, x, n * sizeof(T));
    } else {
      for (uint64_t i = 0; i < n; ++i)
        static_cast<A*>(acc)[i] = widen(static_cast<const T*>(x)[i]);
    }
  });
}

void reduceInto(void* acc, const void* x, DType dtype, ReduceKind kind, uint64_t n) {
  dispatch(dtype, [&](auto t) {
    using T = decltype(t);
    using A = Accumulator<T>;
    A* a = static_cast<A*>(acc);
    const T* b = static_cast<const T*>(x);
    withOperation<A>(kind, [&](auto op) {
      for (uint64_t i = 0; i < n; ++i)
        a[i] = static_cast<A>(op(a[i], widen(b[i])));
    });
  });
}

void reduceLast(void* out, const void* acc, const void* x, DType dtype, ReduceKind kind, uint64_t n, int average_over) {
  dispatch(dtype, [&](auto t) {
    using T = decltype(t);
    using A = Accumulator<T>;
    T* o = static_cast<T*>(out);
    const A* a = static_cast<const A*>(acc);
    const T* b = static_cast<const T*>(x);
    withOperation<A>(kind, [&](auto op) {
      for (uint64_t i = 0; i < n; ++i)
        o[i] = finished<T>(static_cast<A>(op(a[i], widen(b[i]))), average_over);
    });
  });
}

void reduceFinish(void* out, const void* acc, DType dtype, uint64_t n, int average_over) {
  dispatch(dtype, [&](auto t) {
    using T = decltype(t);
    using A = Accumulator<T>;
    T* o = static_cast<T*>(out);
    const A* a = static_cast<const A*>(acc);
    if (average_over == 0 && std::is_integral_v<A> && static_cast<const void*>(o) == acc) return;
    for (uint64_t i = 0; i < n; ++i)
      o[i] = finished<T>(a[i], average_over);
  });
}

void scale(void* out, const void* x, DType dtype, double factor, uint64_t n) {
  dispatch(dtype, [&](auto t) {
    using T = decltype(t);
    using A = Accumulator<T>;
    const A f = static_cast<A>(factor);
    for (uint64_t i = 0; i < n; ++i) {
      static_cast<T*>(out)[i] = narrow<T>(static_cast<A>(widen(static_cast<const T*>(x)[i]) * f));
    }
  });
}

}  // namespace lowcomm

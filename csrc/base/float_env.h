#pragma once

#include <cstdint>
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace lowcomm {

// Holds this thread's floating point control at IEEE defaults (round to nearest even, subnormals kept, no traps) for
// its lifetime and puts the caller's back after it. torch.set_flush_denormal and -ffast-math programs change it, and a
// codec's bytes must not depend on that.
//
// The compiler does not know that arithmetic depends on the control register: guard a call through the kernel table,
// which it cannot move, never arithmetic in the same function.
class FloatEnv {
 public:
#if defined(__x86_64__) || defined(__i386__)
  FloatEnv() : saved_(_mm_getcsr()) {
    if (saved_ != kDefault) _mm_setcsr(kDefault);
  }
  ~FloatEnv() {
    // The sticky exception flags of our own arithmetic are not the caller's: restored with the rest.
    _mm_setcsr(static_cast<uint32_t>(saved_));
  }

 private:
  static constexpr uint32_t kDefault = 0x1f80;  // all exceptions masked, every other bit 0
#elif defined(__aarch64__)
  FloatEnv() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("mrs %0, fpsr" : "=r"(flags_));
    if (saved_ != 0) asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~FloatEnv() {
    if (saved_ != 0) asm volatile("msr fpcr, %0" ::"r"(saved_));
    asm volatile("msr fpsr, %0" ::"r"(flags_));  // sticky, and not the caller's: as above
  }

 private:
  uint64_t flags_ = 0;
#else
  FloatEnv() = default;
  ~FloatEnv() = default;

 private:
#endif
  FloatEnv(const FloatEnv&) = delete;
  FloatEnv& operator=(const FloatEnv&) = delete;
  [[maybe_unused]] uint64_t saved_ = 0;
};

}  // namespace lowcomm

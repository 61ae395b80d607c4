// Vectors of 16 lanes or a part of them, what all loops of an instruction set are written with. The including file has
// included lanes_<isa>.inl, which defines kLanes, the width of its registers in floats (never more: GCC splits wider
// vectors into very slow code), their types, and what only intrinsics can say.
//
// A form is the loops on one of them; its tables are constants, for code of a translation unit of an instruction set
// may run only where the machine has it.
//
// Everything is in an unnamed namespace, and no inline function of another header is called: the linker could otherwise
// keep this instruction set's copy of it for the whole program.

namespace lowcomm {
namespace {

constexpr int kRegistersARow = 16 / kLanes;

typedef Floats FloatsInMemory __attribute__((aligned(1), may_alias));
typedef Words WordsInMemory __attribute__((aligned(1), may_alias));

#define LOWCOMM_INLINE static inline __attribute__((always_inline))

LOWCOMM_INLINE Floats load(const void* p) {
  return *static_cast<const FloatsInMemory*>(p);
}
LOWCOMM_INLINE Words loadWords(const void* p) {
  return *static_cast<const WordsInMemory*>(p);
}
LOWCOMM_INLINE void store(void* p, Floats v) {
  *static_cast<FloatsInMemory*>(p) = v;
}
LOWCOMM_INLINE void storeWords(void* p, Words v) {
  *static_cast<WordsInMemory*>(p) = v;
}
LOWCOMM_INLINE Floats splat(float x) {
  return Floats{} + x;
}
LOWCOMM_INLINE Words splatWord(uint32_t x) {
  return Words{} + x;
}

}  // namespace
}  // namespace lowcomm
